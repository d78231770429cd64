"""Methods the paper compares itself with, and others a user would name, on one core.

A method is a short file that says what is different about it. Which units can go, what goes with
them, compaction and its proof are the same for all; so are the data, the share of MACs, and the
steps of training that each may spend.
"""

from __future__ import annotations

from fpgm.errors import RequestError
from fpgm.paper.baselines import (
    cp,
    group_norm,
    hrank,
    mil,
    nisp,
    pfec,
    rethinking,
    slimming,
    soft,
    taylor,
    thinet,
)
from fpgm.paper.baselines import one_shot as once
from fpgm.paper.baselines.base import Method, Pruned, Schedule, Task
from fpgm.utils.text import meant

__all__ = ["METHODS", "Method", "Pruned", "Schedule", "Task", "find"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        *once.METHODS,
        soft.FPGM,
        soft.MIX,
        pfec.METHOD,
        pfec.CAREFUL,
        soft.SFP,
        thinet.METHOD,
        cp.METHOD,
        nisp.METHOD,
        rethinking.METHOD,
        mil.METHOD,
        slimming.METHOD,
        taylor.METHOD,
        group_norm.METHOD,
        hrank.METHOD,
    )
}


def find(name: str) -> Method:
    """A method by name."""
    if name not in METHODS:
        raise RequestError(
            f"There is no method {name!r}{meant(name, METHODS)}: give some of {', '.join(METHODS)}."
        )
    return METHODS[name]
