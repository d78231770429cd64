"""Batch norms' scales: which there are, whose channels they belong to, and scores by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.paper.baselines.base import classes_of
from fpgm.planning.planner import Planner
from fpgm.utils.modules import modules_by_path


@dataclass(frozen=True)
class Norm:
    """A batch norm's scale and shift, and the classes of its channels."""

    scale: nn.Parameter
    shift: nn.Parameter | None
    classes: Tensor


def norms_of(planner: Planner) -> list[Norm]:
    """Every batch norm with a scale."""
    modules = modules_by_path(planner.model)
    found = []
    for slot in planner.structure.seen.slots.values():
        owner = modules.get(slot.name.rpartition(".")[0])
        if (
            isinstance(owner, nn.modules.batchnorm._BatchNorm)
            and slot.trainable
            and slot.roles == ["scale"]
        ):
            found.append(Norm(owner.weight, owner.bias, planner.structure.of(slot.fields[0])))
    return found


def sizes(planner: Planner) -> Tensor:
    """For every class of units the mean of |γ| over its norms; layers without one are told whole.

    A model none of whose units has a norm cannot be pruned by scales.
    """
    total = torch.zeros(classes_of(planner), dtype=torch.float64)
    times = torch.zeros_like(total)
    for norm in norms_of(planner):
        total.index_add_(0, norm.classes, norm.scale.detach().double().abs().cpu())
        times.index_add_(0, norm.classes, torch.ones(len(norm.classes), dtype=torch.float64))
    bare = [pool for pool in planner.structure.pools if not bool((times[pool.units] > 0).all())]
    for pool in bare:
        planner.structure.freeze(pool.units, "no batch norm with a scale is behind it")
    if not planner.structure.pools:
        raise RequestError("No unit has a batch norm with a scale behind it: use another method.")
    return total / times.clamp(min=1)
