"""One threshold for all layers: whatever scores below it goes, wherever it is.

The paper removes the same share of every layer. Methods whose scores can be compared between
layers rank all units together instead, and each layer loses what falls below the line.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpgm.budget import Budget
from fpgm.errors import RequestError
from fpgm.methods.task import Pruned, cut
from fpgm.planner import Planner
from fpgm.scored import Scored

MOST = 0.95
"""Share of a layer that may go at most: a threshold does not know that some of it is needed."""


def cut_everywhere(planner: Planner, name: str, scores: Tensor) -> Pruned:
    """The model less all units below the threshold that leaves as many MACs as the budget says.

    `scores` has one for every class of units.
    """
    target = planner.budget.target
    if target is None or target[0] != "macs":
        raise RequestError("A threshold for all layers is found for a share of MACs: give macs.")
    planner.score_by(Scored.of_units(name, planner.structure, scores))
    structure = planner.structure
    levels = torch.cat([scores[pool.units] for pool in structure.pools]).unique()
    goal = structure.macs() * (1 - target[1])

    def left(level: int) -> int:
        removed = planner.choose(_budget(planner, scores, levels[level])).removed
        return structure.macs(structure.kept_labels(removed))

    low, high = 0, len(levels) - 1
    if left(high) > goal:
        raise RequestError(f"macs={target[1]:g} cannot be reached: most of every layer would go.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if left(middle) <= goal else (middle, high)
    nearest = min((low, high), key=lambda level: abs(left(level) - goal))
    before, planner.budget = planner.budget, _budget(planner, scores, levels[nearest])
    try:
        return cut(planner)
    finally:
        planner.budget = before


def _budget(planner: Planner, scores: Tensor, level: Tensor) -> Budget:
    """Every pool loses the share of its units that is not above a level."""
    rates: dict[str, float] = {}
    for pool in planner.structure.pools:
        share = min(MOST, float((scores[pool.units] <= level).double().mean()))
        for layer in pool.layers:
            rates[layer] = min(share, rates.get(layer, 1.0))
    return Budget(rates=rates)
