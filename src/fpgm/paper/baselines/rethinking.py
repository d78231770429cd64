"""Rethinking: shrink batch-norm scales to zero during training by soft thresholding (ISTA).

Ye et al. move each scale γ towards zero after every step, by the learning rate times a penalty
proportional to the memory of its channel. Beforehand they multiply the scales by α and divide the
consuming weights by it, which leaves the function unchanged and lets scales reach zero sooner.
Channels with a zero scale are constant; their contribution to the following layers is absorbed
there, here by re-estimating the statistics of the batch norms.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.paper.baselines.base import Method, MethodResult, Task, num_unit_classes, scale_consumers_
from fpgm.paper.baselines.bn_scales import BatchNormScale, batch_norm_scales, mean_scales
from fpgm.paper.baselines.global_threshold import prune_globally
from fpgm.paper.baselines.short_training import train_
from fpgm.planning.planner import Planner
from fpgm.recovery.api import recover
from fpgm.tracing.layer_calls import called_layers
from fpgm.tracing.producers import rows_of
from fpgm.utils.example_inputs import float_outputs

ALPHA = 0.1
"""Factor for the scales; the authors use 0.001 to 1, depending on the length of training."""
PENALTY = 0.005
"""Mean penalty over all channels."""
TOLERANCE = 1e-3
"""Outputs count as equal up to this fraction of the largest one."""


def rethinking(task: Task) -> MethodResult:
    """Rescale, train with soft thresholds, and prune globally by the remaining scales."""
    model = task.trainable_copy().eval()
    planner = task.planner(model=model)
    norms = batch_norm_scales(planner)
    if not norms:
        raise RequestError(
            "This model has no batch norm with a scale, which Rethinking needs: use another method."
        )
    alpha = ALPHA if _rescaling_is_exact(task, planner, norms) else 1.0
    rescale_batch_norms_(model, planner, norms, alpha)
    penalties = memory_penalties(planner, norms)

    def shrink_scales(rate: float) -> None:
        for norm, penalty in zip(norms, penalties, strict=True):
            soft_threshold_(norm.scale, rate * penalty)

    train_(model, task, task.before_pruning, after_step=shrink_scales)
    rescale_batch_norms_(model, planner, norms, 1 / alpha)
    result = prune_globally(planner, "rethinking", mean_scales(planner))
    assert result.plan is not None
    small = recover(model, result.plan, task.loader, method="norms", images=task.images)
    zero = sum(int((norm.scale == 0).sum()) for norm in norms)
    note = f"{zero} of {sum(len(norm.scale) for norm in norms)} scales ended at zero"
    return replace(result, model=small, trained_model=model, notes=(note,))


@torch.no_grad()
def soft_threshold_(scale: Tensor, threshold: Tensor) -> None:
    """Move every number towards zero by a threshold, but not past zero.

    >>> x = torch.tensor([3., -1., 0.5])
    >>> soft_threshold_(x, torch.tensor(1.0))
    >>> x
    tensor([2., -0., 0.])
    """
    scale.copy_(scale.sign() * (scale.abs() - threshold.to(scale)).clamp(min=0))


@torch.no_grad()
def rescale_batch_norms_(
    model: nn.Module, planner: Planner, norms: list[BatchNormScale], alpha: float
) -> None:
    """Multiply scales and shifts by alpha and divide the consuming weights by it.

    Only units whose every filter is followed by exactly one batch norm are changed.
    """
    factors = torch.where(_rescalable_units(planner, norms), alpha, 1.0).double()
    for norm in norms:
        norm.scale.mul_(factors[norm.classes].to(norm.scale))
        if norm.shift is not None:
            norm.shift.mul_(factors[norm.classes].to(norm.shift))
    scale_consumers_(model, planner, 1 / factors)


@torch.no_grad()
def _rescaling_is_exact(task: Task, planner: Planner, norms: list[BatchNormScale]) -> bool:
    """Check that rescaling leaves the outputs unchanged: some activations are not homogeneous."""
    inputs = task.inputs()
    try:
        example = inputs[0]
        expected = float_outputs(planner.model, example)
        rescale_batch_norms_(planner.model, planner, norms, ALPHA)
        outputs = float_outputs(planner.model, example)
        rescale_batch_norms_(planner.model, planner, norms, 1 / ALPHA)
    finally:
        inputs.close()
    size = max(float(w.abs().max()) for w in expected)
    difference = max(float((g - w).abs().max()) for g, w in zip(outputs, expected, strict=True))
    return difference <= TOLERANCE * size


def _rescalable_units(planner: Planner, norms: list[BatchNormScale]) -> Tensor:
    """Mark the classes of units whose every filter is followed by its own batch norm."""
    count = torch.zeros(num_unit_classes(planner), dtype=torch.int64)
    for producer in planner.structure.producers:
        if producer.carries:
            count[producer.classes] -= 1_000_000
        else:
            count.index_add_(0, producer.classes, torch.ones_like(producer.classes))
    for norm in norms:
        count.index_add_(0, norm.classes, -torch.ones_like(norm.classes))
    units = torch.zeros(len(count), dtype=torch.bool)
    for group in planner.structure.groups:
        units[group.units] = True
    return units & (count == 0)


def memory_penalties(planner: Planner, norms: list[BatchNormScale]) -> list[Tensor]:
    """Compute a penalty for every scale, proportional to the memory of its channel.

    The memory is that of the weights that produce it, the weights that consume it, and its feature
    map for one input.
    """
    cost = torch.zeros(num_unit_classes(planner), dtype=torch.float64)
    for info in planner.structure.trace.parameter_infos.values():
        if len(info.shape) > 1 and info.trainable:
            for labels in info.fields:
                classes = planner.structure.classes_of(rows_of(labels))
                each = torch.Size(info.shape).numel() / len(classes)
                cost.index_add_(0, classes, torch.full((len(classes),), each).double())
    maps = torch.zeros_like(cost)
    calls = {c.path: c for c in called_layers(planner.model, planner.examples[0])}
    for producer in planner.structure.producers:
        if (call := calls.get(producer.layer)) is not None:
            maps[producer.classes] = call.given / (call.layer.writes * call.layer.batch)
    costs = [(cost + maps)[norm.classes] for norm in norms]
    mean = torch.cat(costs).mean()
    return [PENALTY * cost_of_norm / mean for cost_of_norm in costs]


METHOD = Method(
    "rethinking",
    "Rethinking",
    "Ye, Lu, Lin, Wang: Rethinking the Smaller-Norm-Less-Informative Assumption in Channel Pruning "
    "of Convolution Layers (ICLR 2018), arXiv:1802.00124",
    "Shrinks batch-norm scales by soft thresholds during training, then removes the smallest of "
    "the whole network.",
    "training",
    rethinking,
)
