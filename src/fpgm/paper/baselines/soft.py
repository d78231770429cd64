"""SFP, and the paper's own Algorithm 1: prune, train on, let what was pruned come back.

He, Kang and others zero the filters with the smallest l2 norm after every epoch and go on training
all of them; FPGM does the same with the most replaceable ones. After the last epoch what is zero is
removed. An epoch here is a share of the steps a task allows before it prunes.
"""

from __future__ import annotations

from functools import partial

from fpgm.paper.baselines.base import Method, Pruned, Task, cut
from fpgm.paper.baselines.short_training import train_pruning_

ROUNDS = 5
"""Prunings within the steps a task allows."""


def soft(task: Task, criterion: str) -> Pruned:
    """Train and zero in turns, then cut what is zero."""
    model = task.copy()
    pruner = train_pruning_(
        model, task, task.before, ROUNDS, macs=task.macs, criterion=criterion,
        residual=task.residual, align=task.align, seed=task.seed,
    )  # fmt: skip
    if pruner is None:  # there was no step to train
        return cut(task.planner(criterion, model))
    small = pruner.compact()
    assert pruner.plan is not None
    return Pruned(small, pruner.plan.macs_removed, pruner.plan, trained=model)


FPGM_CITE = (
    "He, Liu, Wang, Hu, Yang: Filter Pruning via Geometric Median for Deep Convolutional Neural "
    "Networks Acceleration (CVPR 2019), arXiv:1811.00250"
)
SFP = Method(
    "sfp",
    "SFP",
    "He, Kang, Dong, Fu, Yang: Soft Filter Pruning for Accelerating Deep Convolutional Neural "
    "Networks (IJCAI 2018), arXiv:1808.06866",
    "The smallest l2 norms are zeroed again and again during training, and removed at its end.",
    "training",
    partial(soft, criterion="l2"),
)
MIX = Method(
    "fpgm-mix-soft",
    "FPGM-mix, soft",
    FPGM_CITE,
    "Algorithm 1 with both criteria: three quarters by the norm, the rest by the geometric median.",
    "training",
    partial(soft, criterion="mix"),
)
FPGM = Method(
    "fpgm-soft",
    "FPGM, soft",
    FPGM_CITE,
    "Algorithm 1: the filters nearest the geometric median are zeroed again and again during "
    "training, and removed at its end.",
    "training",
    partial(soft, criterion="fpgm"),
)
