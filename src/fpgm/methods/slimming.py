"""Slimming: a penalty on batch norms' scales tells which channels are not needed.

Liu and others add the sum of |γ| to the loss while they train, and remove the channels with the
smallest scales, all layers in one ranking.
"""

from __future__ import annotations

import torch
from torch import nn

from fpgm.methods.everywhere import cut_everywhere
from fpgm.methods.task import Method, Pruned, Task, train_

PENALTY = 1e-3
"""Of the sum of |γ|; the authors take 1e-4 for a training a hundred times as long."""


def slimming(task: Task) -> Pruned:
    """Train with the penalty, then cut by |γ|."""
    model = task.copy()
    scales = scales_of(model)

    def shrink(_: float) -> None:
        for scale in scales:
            if scale.grad is not None:
                scale.grad += PENALTY * scale.detach().sign()

    train_(model, task, task.before, penalise=shrink)
    found = cut_everywhere(task.planner("bn", model))
    return Pruned(found.model, found.macs_removed, found.plan, model, found.gone)


def scales_of(model: nn.Module) -> list[nn.Parameter]:
    """Every batch norm's γ."""
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and isinstance(module.weight, torch.nn.Parameter)
    ]


METHOD = Method(
    "slimming",
    "Slimming",
    "Liu, Li, Shen, Huang, Yan, Zhang: Learning Efficient Convolutional Networks through Network "
    "Slimming (ICCV 2017), arXiv:1708.06519",
    "Training with a penalty on batch norms' scales; the smallest go, all layers in one ranking.",
    "training",
    slimming,
)
