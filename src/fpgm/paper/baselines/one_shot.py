"""Criteria of this package as methods: what Eq. 7 says, at once, and what to hold against it."""

from __future__ import annotations

from collections.abc import Callable

from fpgm.paper.baselines.base import Method, Pruned, Task, cut
from fpgm.paper.baselines.soft import FPGM_CITE


def by(criterion: str) -> Callable[[Task], Pruned]:
    """The same share of every layer goes, by one criterion."""
    return lambda task: cut(task.planner(criterion))


METHODS = (
    Method("fpgm", "FPGM", FPGM_CITE, "Filters nearest the geometric median go.", "weights",
           by("fpgm")),
    Method("fpgm-mix", "FPGM-mix", FPGM_CITE,
           "Three quarters go by the smallest norm, then the rest by the geometric median.",
           "weights", by("mix")),
    Method("l2", "l2 norm", "", "The smallest l2 norms go.", "weights", by("l2")),
    Method("random", "random", "", "Chance: what every method should beat.", "weights",
           by("random")),
)  # fmt: skip
