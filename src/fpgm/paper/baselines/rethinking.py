"""Rethinking: batch norms' scales are made small, and soft thresholds drive them to zero.

Ye and others train with ISTA on γ: after every step each scale moves towards zero by the learning
rate times a penalty that follows how much memory its channel costs, and stays there once it is
reached. Scales are multiplied by α beforehand and the weights that read them divided by it: the
function is the same, and small scales are sooner at zero. Channels at zero are constant: what they
add to the layers behind is taken up there, here by their norms' statistics taken anew.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.paper.baselines.base import Method, Pruned, Task, classes_of, scale_readers_
from fpgm.paper.baselines.bn_scales import Norm, norms_of, sizes
from fpgm.paper.baselines.global_threshold import cut_everywhere
from fpgm.paper.baselines.short_training import train_
from fpgm.planning.planner import Planner
from fpgm.recovery.recover import recover
from fpgm.tracing.grouping import rows_of
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.example_inputs import float_outputs

ALPHA = 0.1
"""What scales are multiplied by; the authors take 0.001 to 1, by how long the training is."""
PENALTY = 0.005
"""Mean of the penalties of all channels."""
SAME = 1e-3
"""Change of outputs, as a share of the largest, up to which a function is the same."""


def rethinking(task: Task) -> Pruned:
    """Make scales small, train with soft thresholds, cut by what is left of them."""
    model = task.copy().eval()
    planner = task.planner(model=model)
    norms = norms_of(planner)
    if not norms:
        raise RequestError("Rethinking thresholds batch norms' scales: this model has none.")
    alpha = ALPHA if _passes(task, planner, norms) else 1.0
    rescale_(model, planner, norms, alpha)
    penalties = penalties_of(planner, norms)

    def settle(rate: float) -> None:
        for norm, penalty in zip(norms, penalties, strict=True):
            soften_(norm.scale, rate * penalty)

    train_(model, task, task.before, settle=settle)
    rescale_(model, planner, norms, 1 / alpha)
    found = cut_everywhere(planner, "rethinking", sizes(planner))
    assert found.plan is not None
    small = recover(model, found.plan, task.loader, method="norms", images=task.images)
    zero = sum(int((norm.scale == 0).sum()) for norm in norms)
    told = f"{zero} of {sum(len(norm.scale) for norm in norms)} scales ended at zero."
    return replace(found, model=small, trained=model, notes=(told,))


@torch.no_grad()
def soften_(scale: Tensor, threshold: Tensor) -> None:
    """Move every number towards zero by a threshold, and no further.

    >>> x = torch.tensor([3., -1., 0.5])
    >>> soften_(x, torch.tensor(1.0))
    >>> x
    tensor([2., -0., 0.])
    """
    scale.copy_(scale.sign() * (scale.abs() - threshold.to(scale)).clamp(min=0))


@torch.no_grad()
def rescale_(model: nn.Module, planner: Planner, norms: list[Norm], alpha: float) -> None:
    """Multiply scales and shifts and divide what reads them.

    Only units that reach their readers through one norm each way are touched.
    """
    factors = torch.where(_scalable(planner, norms), alpha, 1.0).double()
    for norm in norms:
        norm.scale.mul_(factors[norm.classes].to(norm.scale))
        if norm.shift is not None:
            norm.shift.mul_(factors[norm.classes].to(norm.shift))
    scale_readers_(model, planner, 1 / factors)


@torch.no_grad()
def _passes(task: Task, planner: Planner, norms: list[Norm]) -> bool:
    """Whether that leaves the function alone: some activations do not pass factors on."""
    inputs = task.inputs()
    try:
        example = inputs[0]
        wanted = float_outputs(planner.model, example)
        rescale_(planner.model, planner, norms, ALPHA)
        given = float_outputs(planner.model, example)
        rescale_(planner.model, planner, norms, 1 / ALPHA)
    finally:
        inputs.close()
    size = max(float(w.abs().max()) for w in wanted)
    off = max(float((g - w).abs().max()) for g, w in zip(given, wanted, strict=True))
    return off <= SAME * size


def _scalable(planner: Planner, norms: list[Norm]) -> Tensor:
    """Classes every filter of which is followed by a norm of its own."""
    count = torch.zeros(classes_of(planner), dtype=torch.int64)
    for writer in planner.structure.writers:
        if writer.carries:
            count[writer.classes] -= 1_000_000
        else:
            count.index_add_(0, writer.classes, torch.ones_like(writer.classes))
    for norm in norms:
        count.index_add_(0, norm.classes, -torch.ones_like(norm.classes))
    units = torch.zeros(len(count), dtype=torch.bool)
    for pool in planner.structure.pools:
        units[pool.units] = True
    return units & (count == 0)


def penalties_of(planner: Planner, norms: list[Norm]) -> list[Tensor]:
    """For every scale a penalty by the memory its channel takes.

    That is the weights that make it, the weights that read it, and its map, of one input.
    """
    cost = torch.zeros(classes_of(planner), dtype=torch.float64)
    for slot in planner.structure.seen.slots.values():
        if len(slot.shape) > 1 and slot.trainable:
            for labels in slot.fields:
                classes = planner.structure.of(rows_of(labels))
                each = torch.Size(slot.shape).numel() / len(classes)
                cost.index_add_(0, classes, torch.full((len(classes),), each).double())
    maps = torch.zeros_like(cost)
    calls = {c.path: c for c in called_layers(planner.model, planner.examples[0])}
    for writer in planner.structure.writers:
        if (call := calls.get(writer.layer)) is not None:
            maps[writer.classes] = call.given / (call.layer.writes * call.layer.batch)
    found = [(cost + maps)[norm.classes] for norm in norms]
    mean = torch.cat(found).mean()
    return [PENALTY * own / mean for own in found]


METHOD = Method(
    "rethinking",
    "Rethinking",
    "Ye, Lu, Lin, Wang: Rethinking the Smaller-Norm-Less-Informative Assumption in Channel Pruning "
    "of Convolution Layers (ICLR 2018), arXiv:1802.00124",
    "Soft thresholds on batch norms' scales while training; what ends near zero goes, all layers "
    "in one ranking.",
    "training",
    rethinking,
)
