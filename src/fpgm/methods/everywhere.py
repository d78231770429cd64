"""One threshold for all layers: whatever scores below it goes, wherever it is.

The paper removes the same share of every layer. Methods whose scores can be compared between
layers rank all units together instead, and each layer loses what falls below the line.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpgm.budget import Budget
from fpgm.errors import RequestError
from fpgm.methods.task import Pruned, cut
from fpgm.planning import Planner

MOST = 0.95
"""Share of a layer that may go at most: a threshold does not know that some of it is needed."""


def cut_everywhere(planner: Planner, scores: Sequence[Tensor] | None = None) -> Pruned:
    """The model less all units below the threshold that leaves as many MACs as the budget says.

    `scores` are the units', pool by pool, if not those of the planner's own criterion.
    """
    target = planner.budget.target
    if target is None or target[0] != "macs":
        raise RequestError("A threshold for all layers is found for a share of MACs: give macs.")
    known = planner.scores() if scores is None else list(scores)
    levels = torch.cat(known).unique()
    structure = planner.structure
    goal = structure.macs() * (1 - target[1])

    def left(level: int) -> int:
        removed = planner.choose(_budget(planner, known, levels[level])).removed
        return structure.macs(structure.kept_labels(removed))

    low, high = 0, len(levels) - 1
    if left(high) > goal:
        raise RequestError(f"macs={target[1]:g} cannot be reached: most of every layer would go.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if left(middle) <= goal else (middle, high)
    nearest = min((low, high), key=lambda level: abs(left(level) - goal))
    before, planner.budget = planner.budget, _budget(planner, known, levels[nearest])
    try:
        return cut(planner)
    finally:
        planner.budget = before


def _budget(planner: Planner, scores: Sequence[Tensor], level: Tensor) -> Budget:
    """Every pool loses the share of its units that is not above a level."""
    rates: dict[str, float] = {}
    for pool, own in zip(planner.structure.pools, scores, strict=True):
        share = min(MOST, float((own <= level).double().mean()))
        for layer in pool.layers:
            rates[layer] = min(share, rates.get(layer, 1.0))
    return Budget(rates=rates)
