"""ThiNet: channels go whose summands the next layer misses least, one by one.

Luo, Wu and Lin choose greedily the channels that, left out together, change the next layer's output
least, and then scale the others so that they make up for it by least squares. They look at random
entries of that output; here all output channels at random positions are looked at, which is the
same sum with less chance in it. They prune a layer and train an epoch or two before the next; here
all layers are pruned before any training, as for every method compared.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fpgm.paper.baselines.base import Method, Pruned, Task, classes_of, cut, scale_readers_
from fpgm.paper.baselines.unit_contributions import known_products
from fpgm.planning.precomputed_scores import Scored
from fpgm.pruning.compaction import compact

RIDGE = 1e-6
"""Of the mean diagonal: channels that add the same cannot be told apart."""


def thinet(task: Task) -> Pruned:
    """Choose greedily, then scale what stays."""
    planner = task.planner()
    known = known_products(task, planner)
    scores = torch.zeros(classes_of(planner), dtype=torch.float64)
    for units, together in known:
        scores[units[greedy(together)]] = torch.arange(len(units), dtype=torch.float64)
    planner.score_by(Scored.of_units("thinet", planner.structure, scores))
    pruned = cut(planner)
    assert pruned.plan is not None
    assert pruned.gone is not None
    factors = torch.ones(classes_of(planner), dtype=torch.float64)
    for units, together in known:
        stays = ~torch.isin(units, pruned.gone)
        factors[units[stays]] = scaling(together, stays)
    scaled = task.copy()
    scale_readers_(scaled, planner, factors)
    return replace(pruned, model=compact(scaled, pruned.plan))


def greedy(together: Tensor) -> Tensor:
    """The order in which channels go: each time the one with which the least is missed.

    Two channels that cancel each other go before either of two that add up:

    >>> greedy(torch.tensor([[4., -4., 0.], [-4., 4., 0.], [0., 0., 5.]]))
    tensor([0, 1, 2])
    """
    missed = together.diagonal().clone()  # what is missed if this one goes too
    order = []
    for _ in range(len(together)):
        first = int(missed.argmin())
        order.append(first)
        missed += 2 * together[first]
        missed[first] = torch.inf
    return torch.tensor(order)


def scaling(together: Tensor, stays: Tensor) -> Tensor:
    """Factors for the summands that stay, with which they come nearest to the sum of all.

    >>> scaling(torch.ones(2, 2), torch.tensor([True, False])).round(decimals=4)
    tensor([2.], dtype=torch.float64)
    """
    wide = together.double()
    mine = wide[stays][:, stays]
    ridge = RIDGE * float(mine.diagonal().mean()) + 1e-30
    stiff = mine + ridge * torch.eye(len(mine), dtype=torch.float64)
    found: Tensor = torch.linalg.solve(stiff, wide[stays].sum(1))
    return found


METHOD = Method(
    "thinet",
    "ThiNet",
    "Luo, Wu, Lin: ThiNet: A Filter Level Pruning Method for Deep Neural Network Compression "
    "(ICCV 2017), arXiv:1707.06342",
    "Greedy choice of the channels that the next layer misses least, then a factor for each that "
    "stays by least squares.",
    "inputs",
    thinet,
)
