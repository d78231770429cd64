"""Global pruning: rank the units of all layers together and remove those below one threshold.

The FPGM paper removes the same fraction of every layer. Methods whose scores are comparable between
layers use one threshold for the whole network instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpgm.errors import RequestError
from fpgm.paper.baselines.base import MethodResult, prune_and_verify
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner
from fpgm.planning.precomputed_scores import PrecomputedScores

MAX_FRACTION = 0.95
"""Largest fraction of a layer that is removed, so that no layer becomes empty."""


def prune_globally(planner: Planner, name: str, scores: Tensor) -> MethodResult:
    """Remove the lowest-scoring units of the network until the MACs budget is reached.

    Args:
        planner: with a budget in MACs.
        name: of the method.
        scores: one per class of units.
    """
    target = planner.budget.target
    if target is None or target[0] != "macs":
        raise RequestError("A global threshold needs a budget in MACs: give macs.")
    planner.score_by(PrecomputedScores.of_units(name, planner.structure, scores))
    structure = planner.structure
    ranks = global_ranks([scores[group.units] for group in structure.groups])
    goal = structure.macs() * (1 - target[1])

    def macs_left(count: int) -> int:
        removed = planner.choose(_budget_for(planner, ranks, count)).removed
        return structure.macs(structure.kept_labels(removed))

    low, high = 1, sum(map(len, ranks))
    if macs_left(high) > goal:
        raise RequestError(
            f"macs={target[1]:g} cannot be reached, even with {MAX_FRACTION:.0%} of every layer "
            "removed."
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if macs_left(middle) <= goal else (middle, high)
    nearest = min((low, high), key=lambda count: abs(macs_left(count) - goal))
    original_budget, planner.budget = planner.budget, _budget_for(planner, ranks, nearest)
    try:
        return prune_and_verify(planner)
    finally:
        planner.budget = original_budget


def global_ranks(scores: Sequence[Tensor]) -> list[Tensor]:
    """Rank the units of all layers together; return the ranks by layer.

    Units with equal scores (zeros, for example) are interleaved, so that every layer loses the same
    fraction of them:

    >>> global_ranks([torch.tensor([0., 0., 0., 0.]), torch.tensor([7., 0.])])
    [tensor([0, 2, 3, 4]), tensor([5, 1])]
    """
    flat = torch.cat(list(scores))
    within = torch.cat(
        [_inverse_permutation(values.argsort(stable=True)) / len(values) for values in scores]
    )
    order = within.argsort(stable=True)
    order = order[flat[order].argsort(stable=True)]
    return list(_inverse_permutation(order).split([len(values) for values in scores]))


def _inverse_permutation(order: Tensor) -> Tensor:
    """Invert a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse


def _budget_for(planner: Planner, ranks: Sequence[Tensor], count: int) -> Budget:
    """Convert the removal of the `count` lowest-ranked units to a rate for every layer."""
    rates: dict[str, float] = {}
    for group, group_ranks in zip(planner.structure.groups, ranks, strict=True):
        fraction = min(MAX_FRACTION, float((group_ranks < count).double().mean()))
        for layer in group.layers:
            rates[layer] = min(fraction, rates.get(layer, 1.0))
    return Budget(rates=rates)
