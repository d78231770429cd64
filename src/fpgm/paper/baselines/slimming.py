"""Slimming: a penalty on batch norms' scales tells which channels are not needed.

Liu and others add the sum of |γ| to the loss while they train, and remove the channels with the
smallest scales, all layers in one ranking.
"""

from __future__ import annotations

from dataclasses import replace

from fpgm.paper.baselines.base import Method, Pruned, Task
from fpgm.paper.baselines.bn_scales import norms_of, sizes
from fpgm.paper.baselines.global_threshold import cut_everywhere
from fpgm.paper.baselines.short_training import train_

PENALTY = 1e-3
"""Of the sum of |γ|; the authors take 1e-4 for a training a hundred times as long."""


def slimming(task: Task) -> Pruned:
    """Train with the penalty, then cut by |γ|."""
    model = task.copy()
    planner = task.planner(model=model)
    norms = norms_of(planner)

    def shrink(_: float) -> None:
        for norm in norms:
            if norm.scale.grad is not None:
                norm.scale.grad += PENALTY * norm.scale.detach().sign()

    train_(model, task, task.before, penalise=shrink)
    found = cut_everywhere(planner, "slimming", sizes(planner))
    return replace(found, trained=model)


METHOD = Method(
    "slimming",
    "Slimming",
    "Liu, Li, Shen, Huang, Yan, Zhang: Learning Efficient Convolutional Networks through Network "
    "Slimming (ICCV 2017), arXiv:1708.06519",
    "Training with a penalty on batch norms' scales; the smallest go, all layers in one ranking.",
    "training",
    slimming,
)
