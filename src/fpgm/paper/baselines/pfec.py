"""PFEC: filters with the smallest l1 norm go at once, and sensitive layers are spared.

Li and others remove filters by the sum of their absolute weights, layer by layer, without any
training in between, and train the result. Layers at whose pruning accuracy falls steeply are left
alone: each is pruned by itself, and accuracy counted.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from fpgm.errors import RequestError
from fpgm.paper.baselines.base import Method, Pruned, Task, class_scores, cut
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner
from fpgm.pruning.masking import mask_
from fpgm.utils.preserve_state import undisturbed

PROBED = 0.3
"""Share of a layer that is removed to see how sensitive it is."""
DROP = 0.05
"""Accuracy that may be lost by that; a layer that loses more stays whole."""


def pfec(task: Task) -> Pruned:
    """The smallest norms go, the same share of every layer."""
    return cut(task.planner("l1"))


def careful(task: Task) -> Pruned:
    """The same, but for layers that are sensitive; the others lose more instead."""
    planner = task.planner("l1")
    spared = spare_(planner, task)
    told = f"spared {', '.join(spared)}" if spared else "no layer was sensitive: the same as PFEC"
    return replace(cut(planner), notes=(told,))


def spare_(planner: Planner, task: Task, drop: float = DROP) -> list[str]:
    """Tell a planner to leave sensitive layers whole, and which they are.

    If too little is left to reach the budget, the milder half is given up, and again.
    """
    losses = sensitivities(planner, task)
    spared = sorted((layer for layer in losses if losses[layer] > drop), key=lambda n: -losses[n])
    asked = planner.budget
    while True:
        planner.budget = Budget(macs=asked.macs, rates=dict.fromkeys(spared, 0.0))
        try:
            planner.choose(planner.budget)
        except RequestError:
            if not spared:
                raise
            spared = spared[: len(spared) // 2]
        else:
            return spared


def sensitivities(planner: Planner, task: Task) -> dict[str, float]:
    """Accuracy that is lost by pruning each group alone, by its layers' names."""
    whole = accuracy(planner.model, task)
    found: dict[str, float] = {}
    asked = planner.budget
    pools = list(planner.structure.pools)
    try:
        for number, pool in enumerate(pools):
            if task.progress is not None:
                task.progress("sensitivity", number, len(pools))
            planner.budget = Budget(rates=dict.fromkeys(pool.layers, PROBED))
            masked = copy.deepcopy(planner.model)
            mask_(masked, planner.draw().plan)
            loss = whole - accuracy(masked, task)
            for layer in pool.layers:
                found[layer] = max(loss, found.get(layer, 0.0))
    finally:
        planner.budget = asked
    return found


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    """Share of the task's inputs that a classifier gets right."""
    right = seen = 0
    with undisturbed(model):
        model.eval()
        for x, classes in task.labelled():
            right += int((class_scores(model, x).argmax(1) == classes).sum())
            seen += len(x)
    return right / max(1, seen)


CITE = (
    "Li, Kadav, Durdanovic, Samet, Graf: Pruning Filters for Efficient ConvNets (ICLR 2017), "
    "arXiv:1608.08710"
)

METHOD = Method("pfec", "PFEC", CITE, "The smallest l1 norms go, at once.", "weights", pfec)
CAREFUL = Method(
    "pfec-sensitivity",
    "PFEC, sensitive layers spared",
    CITE,
    "The smallest l1 norms go, at once; layers at whose pruning accuracy falls stay whole.",
    "labels",
    careful,
)
