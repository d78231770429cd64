"""Group norm: all weights that belong to a unit count, those that read it too.

Fang and others (DepGraph) sum the squares of every parameter that would go with a unit, divide by
the mean of the largest in its group (here by that of all of them), and rank all units together.
Before that, training shrinks the weights of each unit the more, the smaller its sum is within its
group.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fpgm.paper.baselines.base import Method, Pruned, Task, classes_of
from fpgm.paper.baselines.global_threshold import cut_everywhere
from fpgm.paper.baselines.short_training import train_
from fpgm.planning.planner import Planner
from fpgm.utils.modules import named_tensors

PENALTY = 5e-4
"""Pull towards zero of the largest unit of a group, as weight decay."""
STRENGTH = 4
"""The smallest unit of a group is pulled 2 to this power times as hard as the largest."""


def group_norm(task: Task) -> Pruned:
    """Train with the penalty, then cut by the norm over everything that goes with a unit."""
    model = task.copy()
    planner = task.planner(model=model)
    groups = _Groups(planner)

    def shrink(_: float) -> None:
        pulls = groups.pulls()
        for parameter, classes in groups.members:
            if parameter.grad is not None:
                parameter.grad += PENALTY * pulls[classes].to(parameter) * parameter.detach()

    train_(model, task, task.before, penalise=shrink)
    found = cut_everywhere(planner, "group-norm", groups.shares())
    return replace(found, trained=model)


class _Groups:
    """All parameters of a model that belong to units, and which unit each of their numbers is."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        tensors = named_tensors(planner.model)
        self.members: list[tuple[nn.Parameter, Tensor]] = []
        for slot in planner.structure.seen.slots.values():
            tensor = tensors[slot.name]
            if isinstance(tensor, nn.Parameter):
                fields = (planner.structure.of(labels) for labels in slot.fields)
                self.members += [(tensor, classes) for classes in fields]

    def sums(self) -> Tensor:
        """Of every class: the squares of all its parameters."""
        total = torch.zeros(classes_of(self.planner), dtype=torch.float64)
        for parameter, classes in self.members:
            squares = parameter.detach().double().square().cpu()
            total.index_add_(0, classes.expand(squares.shape).reshape(-1), squares.reshape(-1))
        return total

    def shares(self) -> Tensor:
        """Of every class: its sum as a share of the mean in its pool."""
        sums = self.sums()
        shares = torch.zeros_like(sums)
        for pool in self.planner.structure.pools:
            own = sums[pool.units]
            shares[pool.units] = own / own.mean().clamp(min=1e-30)
        return shares

    def pulls(self) -> Tensor:
        """How hard each class is pulled towards zero."""
        sums = self.sums()
        pulls = torch.zeros_like(sums)
        for pool in self.planner.structure.pools:
            own = sums[pool.units]
            span = (own.max() - own.min()).clamp(min=1e-30)
            pulls[pool.units] = 2 ** (STRENGTH * (own.max() - own) / span)
        return pulls


METHOD = Method(
    "group-norm",
    "Group norm",
    "Fang, Ma, Song, Mi, Wang: DepGraph: Towards Any Structural Pruning (CVPR 2023), "
    "arXiv:2301.12900",
    "Training with a group lasso; units go by the norm of all weights that belong to them.",
    "training",
    group_norm,
)
