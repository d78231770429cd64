"""PFEC: one-shot pruning by l1 norm, optionally without sensitive layers.

Li et al. remove the filters with the smallest sum of absolute weights in one shot, and fine-tune
the result. To find sensitive layers, each layer is pruned separately and accuracy is measured;
layers with a large drop are not pruned.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from fpgm.errors import RequestError
from fpgm.paper.baselines.base import Method, MethodResult, Task, class_logits, prune_and_verify
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner
from fpgm.pruning.masking import mask_
from fpgm.utils.accuracy import AccuracyCounter
from fpgm.utils.preserve_state import preserve_state

PROBE_RATE = 0.3
"""Fraction of a layer that is removed to measure its sensitivity."""
MAX_DROP = 0.05
"""Layers with a larger drop of accuracy are not pruned."""


def pfec(task: Task) -> MethodResult:
    """Remove the same fraction of every layer by l1 norm."""
    return prune_and_verify(task.planner("l1"))


def pfec_with_sensitivity(task: Task) -> MethodResult:
    """Remove filters by l1 norm from all layers that are not sensitive."""
    planner = task.planner("l1")
    skipped = skip_sensitive_layers_(planner, task)
    note = f"not pruned: {', '.join(skipped)}" if skipped else "no sensitive layer: same as PFEC"
    return replace(prune_and_verify(planner), notes=(note,))


def skip_sensitive_layers_(planner: Planner, task: Task, max_drop: float = MAX_DROP) -> list[str]:
    """Exclude sensitive layers from a planner's budget, and return them.

    If the budget cannot be reached without them, the less sensitive half is pruned too, repeatedly.
    """
    drops = accuracy_drops(planner, task)
    skipped = sorted((layer for layer in drops if drops[layer] > max_drop), key=lambda n: -drops[n])
    requested = planner.budget
    while True:
        planner.budget = Budget(macs=requested.macs, rates=dict.fromkeys(skipped, 0.0))
        try:
            planner.choose(planner.budget)
        except RequestError:
            if not skipped:
                raise
            skipped = skipped[: len(skipped) // 2]
        else:
            return skipped


def accuracy_drops(planner: Planner, task: Task) -> dict[str, float]:
    """Measure the drop of accuracy when each group is pruned separately, by layer."""
    original = accuracy(planner.model, task)
    drops: dict[str, float] = {}
    requested = planner.budget
    groups = list(planner.structure.groups)
    try:
        for number, group in enumerate(groups):
            if task.progress is not None:
                task.progress("sensitivity", number, len(groups))
            planner.budget = Budget(rates=dict.fromkeys(group.layers, PROBE_RATE))
            masked = copy.deepcopy(planner.model)
            mask_(masked, planner.build_plan().plan)
            drop = original - accuracy(masked, task)
            for layer in group.layers:
                drops[layer] = max(drop, drops.get(layer, 0.0))
    finally:
        planner.budget = requested
    return drops


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    """Measure a classifier's accuracy on the task's calibration inputs."""
    counter = AccuracyCounter()
    with preserve_state(model):
        model.eval()
        for x, classes in task.labelled_batches():
            counter.add(class_logits(model, x), classes)
    return counter.accuracy or 0.0


CITE = (
    "Li, Kadav, Durdanovic, Samet, Graf: Pruning Filters for Efficient ConvNets (ICLR 2017), "
    "arXiv:1608.08710"
)

METHOD = Method("pfec", "PFEC", CITE, "Removes the smallest l1 norms in one shot.", "weights", pfec)
SENSITIVITY_METHOD = Method(
    "pfec-sensitivity",
    "PFEC, without sensitive layers",
    CITE,
    "Removes the smallest l1 norms in one shot, except in layers whose pruning hurts accuracy.",
    "labels",
    pfec_with_sensitivity,
)
