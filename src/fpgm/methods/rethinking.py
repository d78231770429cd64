"""Rethinking: batch norms' scales are made small, and soft thresholds drive them to zero.

Ye and others train with ISTA on γ: after every step each scale moves towards zero by the learning
rate times a penalty that follows how much memory its channel costs, and stays there once it is
reached. Scales are multiplied by α beforehand and the weights that read them divided by it, which
leaves the function alone and makes zero near. Channels at zero are constant: what they add to the
layers behind is taken up there, here by their norms' statistics taken anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fpgm.coupling import rows_of
from fpgm.examples import float_outputs
from fpgm.latency.layers import Called, called_layers
from fpgm.methods.everywhere import cut_everywhere
from fpgm.methods.task import Method, Pruned, Task, classes_of, scale_readers_, train_
from fpgm.planning import Planner
from fpgm.recovery import recover
from fpgm.tensors import modules_by_path, named_tensors

ALPHA = 0.1
"""What scales are multiplied by; the authors take 0.001 to 1, by how long the training is."""
PENALTY = 0.05
"""Mean of the penalties of all channels, for the scales as they were before that."""
SAME = 1e-3
"""Change of outputs, as a share of the largest, up to which a function is the same."""


def rethinking(task: Task) -> Pruned:
    """Make scales small, train with soft thresholds, cut by what is left of them."""
    model = task.copy().eval()
    planner = task.planner("bn", model)
    norms = norms_of(planner)
    alpha = rescale_(model, planner, norms, ALPHA)
    penalties = penalties_of(planner, norms)

    def settle(rate: float) -> None:
        for norm, penalty in zip(norms, penalties, strict=True):
            soften_(norm.scale, alpha * rate * penalty)

    train_(model, task, task.before, settle=settle)
    rescale_(model, planner, norms, 1 / alpha)
    found = cut_everywhere(planner)
    assert found.plan is not None
    small = recover(model, found.plan, task.loader, method="norms", images=task.images)
    zero = sum(int((norm.scale == 0).sum()) for norm in norms)
    told = f"{zero} of {sum(len(norm.scale) for norm in norms)} scales ended at zero."
    return Pruned(small, found.macs_removed, found.plan, model, found.gone, (told,))


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
def rescale_(model: nn.Module, planner: Planner, norms: list[Norm], alpha: float) -> float:
    """Multiply scales and shifts and divide what reads them; returns by what: 1 if not at all.

    Only units that reach their readers through one norm each way are touched; if the function is
    another afterwards (activations that do not pass factors on), everything is put back.
    """
    factors = torch.where(_scalable(planner, norms), alpha, 1.0).double()
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    wanted = float_outputs(model.eval(), planner.examples[0])
    for norm in norms:
        norm.scale.mul_(factors[norm.classes].to(norm.scale))
        if norm.shift is not None:
            norm.shift.mul_(factors[norm.classes].to(norm.shift))
    scale_readers_(model, planner, 1 / factors)
    given = float_outputs(model, planner.examples[0])
    size = max(float(w.abs().max()) for w in wanted)
    if max(float((g - w).abs().max()) for g, w in zip(given, wanted, strict=True)) <= SAME * size:
        return alpha
    for name, tensor in named_tensors(model).items():
        tensor.copy_(before[name])
    return 1.0


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
    """For every scale a penalty by what its channel costs: weights that make and read it."""
    cost = torch.zeros(classes_of(planner), dtype=torch.float64)
    sizes = {c.path: c.given // c.layer.writes for c in _calls(planner)}
    for slot in planner.structure.seen.slots.values():
        layer, _, kind = slot.name.rpartition(".")
        for labels in slot.fields if kind == "weight" and layer in sizes else ():
            classes = planner.structure.of(rows_of(labels))
            each = torch.Size(slot.shape).numel() / len(classes)
            cost.index_add_(0, classes, torch.full((len(classes),), each / sizes[layer]).double())
    found = [cost[norm.classes] + 1 for norm in norms]
    mean = torch.cat(found).mean()
    return [PENALTY * own / mean for own in found]


def _calls(planner: Planner) -> list[Called]:
    return called_layers(planner.model, planner.examples[0])


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
