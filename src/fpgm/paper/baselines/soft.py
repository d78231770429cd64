"""Soft pruning during training: SFP, and the FPGM paper's Algorithm 1.

SFP (He, Kang et al.) zeroes the filters with the smallest l2 norm after every epoch and continues
to train all filters, so that zeroed ones may recover. FPGM does the same with the filters nearest
to the geometric median. After the last epoch the zeroed filters are removed. Here an "epoch" is a
fraction of the training steps that a task allows before pruning.
"""

from __future__ import annotations

from functools import partial

from fpgm.paper.baselines.base import Method, MethodResult, Task, prune_and_verify
from fpgm.paper.baselines.short_training import train_and_prune_

PRUNING_STEPS = 5
"""Number of pruning steps during the training that a task allows."""


def soft_prune(task: Task, criterion: str) -> MethodResult:
    """Alternate training and zeroing of filters, then remove the zeroed ones."""
    model = task.trainable_copy()
    pruner = train_and_prune_(
        model, task, task.before_pruning, PRUNING_STEPS, macs=task.macs, criterion=criterion,
        residual=task.residual, align=task.align, seed=task.seed,
    )  # fmt: skip
    if pruner is None:  # no training steps
        return prune_and_verify(task.planner(criterion, model))
    small = pruner.compact()
    assert pruner.plan is not None
    return MethodResult(small, pruner.plan.macs_removed, pruner.plan, trained_model=model)


FPGM_CITE = (
    "He, Liu, Wang, Hu, Yang: Filter Pruning via Geometric Median for Deep Convolutional Neural "
    "Networks Acceleration (CVPR 2019), arXiv:1811.00250"
)
SFP = Method(
    "sfp",
    "SFP",
    "He, Kang, Dong, Fu, Yang: Soft Filter Pruning for Accelerating Deep Convolutional Neural "
    "Networks (IJCAI 2018), arXiv:1808.06866",
    "Zeroes the smallest l2 norms repeatedly during training, and removes them at the end.",
    "training",
    partial(soft_prune, criterion="l2"),
)
MIX = Method(
    "fpgm-mix-soft",
    "FPGM-mix, soft",
    FPGM_CITE,
    "Algorithm 1 with both criteria: three quarters by norm, the rest by the geometric median.",
    "training",
    partial(soft_prune, criterion="mix"),
)
FPGM = Method(
    "fpgm-soft",
    "FPGM, soft",
    FPGM_CITE,
    "Algorithm 1: zeroes the filters nearest to the geometric median repeatedly during training, "
    "and removes them at the end.",
    "training",
    partial(soft_prune, criterion="fpgm"),
)
