"""One-shot pruning by a criterion of this package: FPGM, FPGM-mix, and the l2 and random baselines.

The same fraction of every layer is removed, without training.
"""

from __future__ import annotations

from collections.abc import Callable

from fpgm.paper.baselines.base import Method, MethodResult, Task, prune_and_verify
from fpgm.paper.baselines.soft import FPGM_CITE


def prune_by(criterion: str) -> Callable[[Task], MethodResult]:
    """Return a method that removes the same fraction of every layer by one criterion."""
    return lambda task: prune_and_verify(task.planner(criterion))


METHODS = (
    Method("fpgm", "FPGM", FPGM_CITE, "Removes the filters nearest to the geometric median.",
           "weights", prune_by("fpgm")),
    Method("fpgm-mix", "FPGM-mix", FPGM_CITE,
           "Removes three quarters by the smallest norm, the rest by the geometric median.",
           "weights", prune_by("mix")),
    Method("l2", "l2 norm", "", "Removes the filters with the smallest l2 norm.", "weights",
           prune_by("l2")),
    Method("random", "random", "", "Removes random filters: what every method should beat.",
           "weights", prune_by("random")),
)  # fmt: skip
