"""ThiNet: greedily remove the channels that change the next layer's output least.

Luo, Wu and Lin choose greedily the channels whose removal changes the next layer's output least,
and scale the remaining channels by least squares to compensate. They sample random entries of the
output; here all output channels at random positions are used, which estimates the same sum with
less variance. They fine-tune for one or two epochs after each layer; here all layers are pruned
before any training, as for every compared method.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fpgm.paper.baselines.base import (
    Method,
    MethodResult,
    Task,
    num_unit_classes,
    prune_and_verify,
    scale_consumers_,
)
from fpgm.paper.baselines.unit_contributions import contribution_products
from fpgm.planning.precomputed_scores import PrecomputedScores
from fpgm.pruning.compaction import compact

RIDGE = 1e-6
"""Regularization as a fraction of the mean diagonal, for channels that are equal."""


def thinet(task: Task) -> MethodResult:
    """Choose channels greedily, then scale the kept ones."""
    planner = task.planner()
    products = contribution_products(task, planner)
    scores = torch.zeros(num_unit_classes(planner), dtype=torch.float64)
    for units, gram in products:
        scores[units[removal_order(gram)]] = torch.arange(len(units), dtype=torch.float64)
    planner.score_by(PrecomputedScores.of_units("thinet", planner.structure, scores))
    pruned = prune_and_verify(planner)
    assert pruned.plan is not None
    assert pruned.removed is not None
    factors = torch.ones(num_unit_classes(planner), dtype=torch.float64)
    for units, gram in products:
        kept = ~torch.isin(units, pruned.removed)
        factors[units[kept]] = compensation_factors(gram, kept)
    scaled_model = task.trainable_copy()
    scale_consumers_(scaled_model, planner, factors)
    return replace(pruned, model=compact(scaled_model, pruned.plan))


def removal_order(gram: Tensor) -> Tensor:
    """Order channels for removal: each time the one that adds the least error.

    Two channels that cancel each other are removed first:

    >>> removal_order(torch.tensor([[4., -4., 0.], [-4., 4., 0.], [0., 0., 5.]]))
    tensor([0, 1, 2])
    """
    error = gram.diagonal().clone()  # if this channel is removed too
    order = []
    for _ in range(len(gram)):
        first = int(error.argmin())
        order.append(first)
        error += 2 * gram[first]
        error[first] = torch.inf
    return torch.tensor(order)


def compensation_factors(gram: Tensor, kept: Tensor) -> Tensor:
    """Compute factors for the kept channels that best approximate the sum of all channels.

    >>> compensation_factors(torch.ones(2, 2), torch.tensor([True, False])).round(decimals=4)
    tensor([2.], dtype=torch.float64)
    """
    gram64 = gram.double()
    kept_gram = gram64[kept][:, kept]
    ridge = RIDGE * float(kept_gram.diagonal().mean()) + 1e-30
    regularized = kept_gram + ridge * torch.eye(len(kept_gram), dtype=torch.float64)
    factors: Tensor = torch.linalg.solve(regularized, gram64[kept].sum(1))
    return factors


METHOD = Method(
    "thinet",
    "ThiNet",
    "Luo, Wu, Lin: ThiNet: A Filter Level Pruning Method for Deep Neural Network Compression "
    "(ICCV 2017), arXiv:1707.06342",
    "Removes channels greedily by the error in the next layer's output, then scales the kept ones "
    "by least squares.",
    "inputs",
    thinet,
)
