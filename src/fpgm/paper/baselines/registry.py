"""All compared methods by name: those of the paper, and other well-known ones.

Each method is a short file with what is specific to it. Finding channel groups, compaction and
verification are the same for all methods, and so are the data, the fraction of MACs to remove, and
the number of training steps.
"""

from __future__ import annotations

from fpgm.errors import RequestError
from fpgm.paper.baselines import (
    cp,
    group_norm,
    hrank,
    mil,
    nisp,
    one_shot,
    pfec,
    rethinking,
    slimming,
    soft,
    taylor,
    thinet,
)
from fpgm.paper.baselines.base import Method, MethodResult, SgdSchedule, Task
from fpgm.utils.text import suggest_name

__all__ = ["METHODS", "Method", "MethodResult", "SgdSchedule", "Task", "get_method"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        *one_shot.METHODS,
        soft.FPGM,
        soft.MIX,
        pfec.METHOD,
        pfec.SENSITIVITY_METHOD,
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


def get_method(name: str) -> Method:
    """Return a method by name; raise a `RequestError` with a suggestion if it is unknown."""
    if name not in METHODS:
        raise RequestError(
            f"Unknown method {name!r}{suggest_name(name, METHODS)}. Methods: {', '.join(METHODS)}."
        )
    return METHODS[name]
