"""Network Slimming: train with an l1 penalty on batch-norm scales and remove the smallest ones.

Liu et al. add the sum of |γ| to the loss during training, and remove the channels with the smallest
scales, with one ranking for all layers.
"""

from __future__ import annotations

from dataclasses import replace

from fpgm.paper.baselines.base import Method, MethodResult, Task
from fpgm.paper.baselines.bn_scales import batch_norm_scales, mean_scales
from fpgm.paper.baselines.global_threshold import prune_globally
from fpgm.paper.baselines.short_training import train_

PENALTY = 1e-3
"""Weight of the sum of |γ|; the authors use 1e-4 for a training that is 100 times as long."""


def slimming(task: Task) -> MethodResult:
    """Train with the penalty, then prune globally by |γ|."""
    model = task.trainable_copy()
    planner = task.planner(model=model)
    norms = batch_norm_scales(planner)

    def add_penalty(_: float) -> None:
        for norm in norms:
            if norm.scale.grad is not None:
                norm.scale.grad += PENALTY * norm.scale.detach().sign()

    train_(model, task, task.before_pruning, before_step=add_penalty)
    result = prune_globally(planner, "slimming", mean_scales(planner))
    return replace(result, trained_model=model)


METHOD = Method(
    "slimming",
    "Slimming",
    "Liu, Li, Shen, Huang, Yan, Zhang: Learning Efficient Convolutional Networks through Network "
    "Slimming (ICCV 2017), arXiv:1708.06519",
    "Trains with a penalty on batch-norm scales, then removes the smallest of the whole network.",
    "training",
    slimming,
)
