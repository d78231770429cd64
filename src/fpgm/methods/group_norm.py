"""Group norm: all weights that belong to a unit count, those that read it too.

Fang and others (DepGraph) take the l2 norm over every parameter that would go with a unit, divided
by its mean over the group, and rank all units together. Before that, training shrinks the weights
of each unit the more, the smaller its norm is within its group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fpgm.methods.everywhere import cut_everywhere
from fpgm.methods.task import Method, Pruned, Task, classes_of, train_
from fpgm.planning import Planner
from fpgm.tensors import named_tensors

PENALTY = 5e-4
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
    planner.asked["criterion"] = "group-norm"
    found = cut_everywhere(planner, groups.normed())
    return Pruned(found.model, found.macs_removed, found.plan, model, found.gone)


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

    def norms(self) -> Tensor:
        """Of every class: the l2 norm over all its parameters."""
        total = torch.zeros(classes_of(self.planner), dtype=torch.float64)
        for parameter, classes in self.members:
            squares = parameter.detach().double().square().cpu()
            total.index_add_(0, classes.expand(squares.shape).reshape(-1), squares.reshape(-1))
        return total.sqrt()

    def normed(self) -> list[Tensor]:
        """Pool by pool, as a share of the pool's mean."""
        norms = self.norms()
        found = [norms[pool.units] for pool in self.planner.structure.pools]
        return [own / own.mean().clamp(min=1e-30) for own in found]

    def pulls(self) -> Tensor:
        """How hard each class is pulled towards zero."""
        norms = self.norms()
        pulls = torch.zeros_like(norms)
        for pool in self.planner.structure.pools:
            own = norms[pool.units]
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
