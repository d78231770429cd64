"""Group norm (DepGraph): score a unit by all parameters that are removed with it.

Fang et al. sum the squares of every parameter that belongs to a unit, including the weights that
consume it, divide by the mean of the largest sums in its group (here by the mean of all sums), and
rank all units of the network together. Before pruning, training applies a weight decay that is
stronger for units with a smaller sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fpgm.paper.baselines.base import Method, MethodResult, Task, num_unit_classes
from fpgm.paper.baselines.global_threshold import prune_globally
from fpgm.paper.baselines.short_training import train_
from fpgm.planning.planner import Planner
from fpgm.utils.modules import named_tensors

PENALTY = 5e-4
"""Weight decay of the largest unit of a group."""
STRENGTH = 4
"""The decay of a group's smallest unit is 2 to this power times that of its largest."""


def group_norm(task: Task) -> MethodResult:
    """Train with the penalty, then prune by the norm of all parameters of a unit."""
    model = task.trainable_copy()
    planner = task.planner(model=model)
    groups = _UnitParameters(planner)

    def add_penalty(_: float) -> None:
        factors = groups.decay_factors()
        for parameter, classes in groups.members:
            if parameter.grad is not None:
                parameter.grad += PENALTY * factors[classes].to(parameter) * parameter.detach()

    train_(model, task, task.before_pruning, before_step=add_penalty)
    result = prune_globally(planner, "group-norm", groups.relative_norms())
    return replace(result, trained_model=model)


class _UnitParameters:
    """All parameters of a model that belong to units, with the unit of each of their entries."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        tensors = named_tensors(planner.model)
        self.members: list[tuple[nn.Parameter, Tensor]] = []
        for info in planner.structure.trace.parameter_infos.values():
            tensor = tensors[info.name]
            if isinstance(tensor, nn.Parameter):
                fields = (planner.structure.classes_of(labels) for labels in info.fields)
                self.members += [(tensor, classes) for classes in fields]

    def squared_sums(self) -> Tensor:
        """Sum, for every class of units, the squares of its parameters."""
        total = torch.zeros(num_unit_classes(self.planner), dtype=torch.float64)
        for parameter, classes in self.members:
            squares = parameter.detach().double().square().cpu()
            total.index_add_(0, classes.expand(squares.shape).reshape(-1), squares.reshape(-1))
        return total

    def relative_norms(self) -> Tensor:
        """Divide each class's sum by the mean of its group."""
        squared_sums = self.squared_sums()
        relative_norms = torch.zeros_like(squared_sums)
        for group in self.planner.structure.groups:
            group_sums = squared_sums[group.units]
            relative_norms[group.units] = group_sums / group_sums.mean().clamp(min=1e-30)
        return relative_norms

    def decay_factors(self) -> Tensor:
        """Compute the factor of the weight decay for each class."""
        squared_sums = self.squared_sums()
        decay_factors = torch.zeros_like(squared_sums)
        for group in self.planner.structure.groups:
            group_sums = squared_sums[group.units]
            span = (group_sums.max() - group_sums.min()).clamp(min=1e-30)
            decay_factors[group.units] = 2 ** (STRENGTH * (group_sums.max() - group_sums) / span)
        return decay_factors


METHOD = Method(
    "group-norm",
    "Group norm",
    "Fang, Ma, Song, Mi, Wang: DepGraph: Towards Any Structural Pruning (CVPR 2023), "
    "arXiv:2301.12900",
    "Trains with a group penalty, then removes units by the norm of all their parameters.",
    "training",
    group_norm,
)
