"""Find the batch-norm scales of a model and score units by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.paper.baselines.base import num_unit_classes
from fpgm.planning.planner import Planner
from fpgm.utils.modules import modules_by_path


@dataclass(frozen=True)
class BatchNormScale:
    """A batch norm's scale and shift, and the unit classes of its channels."""

    scale: nn.Parameter
    shift: nn.Parameter | None
    classes: Tensor


def batch_norm_scales(planner: Planner) -> list[BatchNormScale]:
    """List all batch norms that have a trainable scale."""
    modules = modules_by_path(planner.model)
    scales = []
    for info in planner.structure.trace.parameter_infos.values():
        owner = modules.get(info.name.rpartition(".")[0])
        if (
            isinstance(owner, nn.modules.batchnorm._BatchNorm)
            and info.trainable
            and info.roles == ["scale"]
        ):
            scales.append(
                BatchNormScale(
                    owner.weight, owner.bias, planner.structure.classes_of(info.fields[0])
                )
            )
    return scales


def mean_scales(planner: Planner) -> Tensor:
    """Compute the mean |γ| of every class of units; freeze groups without a batch norm.

    Raises a `RequestError` if no group has a batch norm.
    """
    total = torch.zeros(num_unit_classes(planner), dtype=torch.float64)
    counts = torch.zeros_like(total)
    for norm in batch_norm_scales(planner):
        total.index_add_(0, norm.classes, norm.scale.detach().double().abs().cpu())
        counts.index_add_(0, norm.classes, torch.ones(len(norm.classes), dtype=torch.float64))
    without_scale = [
        group for group in planner.structure.groups if not bool((counts[group.units] > 0).all())
    ]
    for group in without_scale:
        planner.structure.freeze(group.units, "no batch norm with a scale follows it")
    if not planner.structure.groups:
        raise RequestError("No layer is followed by a batch norm with a scale: use another method.")
    return total / counts.clamp(min=1)
