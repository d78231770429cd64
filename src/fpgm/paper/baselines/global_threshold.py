"""One threshold for all layers: whatever scores below it goes, wherever it is.

The paper removes the same share of every layer. Methods whose scores can be compared between
layers rank all units together instead, and each layer loses what falls below the line.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpgm.errors import RequestError
from fpgm.paper.baselines.base import Pruned, cut
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner
from fpgm.planning.precomputed_scores import Scored

MOST = 0.95
"""Share of a layer that may go at most: a threshold does not know that some of it is needed."""


def cut_everywhere(planner: Planner, name: str, scores: Tensor) -> Pruned:
    """The model less the lowest units of all, as many as leave the MACs that the budget says.

    `scores` has one for every class of units.
    """
    target = planner.budget.target
    if target is None or target[0] != "macs":
        raise RequestError("A threshold for all layers is found for a share of MACs: give macs.")
    planner.score_by(Scored.of_units(name, planner.structure, scores))
    structure = planner.structure
    places = in_order([scores[pool.units] for pool in structure.pools])
    goal = structure.macs() * (1 - target[1])

    def left(count: int) -> int:
        removed = planner.choose(_budget(planner, places, count)).removed
        return structure.macs(structure.kept_labels(removed))

    low, high = 1, sum(map(len, places))
    if left(high) > goal:
        raise RequestError(f"macs={target[1]:g} cannot be reached: most of every layer would go.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if left(middle) <= goal else (middle, high)
    nearest = min((low, high), key=lambda count: abs(left(count) - goal))
    before, planner.budget = planner.budget, _budget(planner, places, nearest)
    try:
        return cut(planner)
    finally:
        planner.budget = before


def in_order(scores: Sequence[Tensor]) -> list[Tensor]:
    """The place of every unit in one order of all layers' units, by layer.

    Many may score the same, zeros above all. Of those every layer loses its share:

    >>> in_order([torch.tensor([0., 0., 0., 0.]), torch.tensor([7., 0.])])
    [tensor([0, 2, 3, 4]), tensor([5, 1])]
    """
    flat = torch.cat(list(scores))
    within = torch.cat([_inverse(own.argsort(stable=True)) / len(own) for own in scores])
    order = within.argsort(stable=True)
    order = order[flat[order].argsort(stable=True)]
    return list(_inverse(order).split([len(own) for own in scores]))


def _inverse(order: Tensor) -> Tensor:
    """Where each is, from which is where."""
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order))
    return found


def _budget(planner: Planner, places: Sequence[Tensor], count: int) -> Budget:
    """Every pool loses the share of its units that is among the first so many."""
    rates: dict[str, float] = {}
    for pool, own in zip(planner.structure.pools, places, strict=True):
        share = min(MOST, float((own < count).double().mean()))
        for layer in pool.layers:
            rates[layer] = min(share, rates.get(layer, 1.0))
    return Budget(rates=rates)
