"""What every compared method is given, and what it hands back.

All methods prune the same trained model to the same share of MACs with the same data. What a
method does to weights is its own; which units may go, compaction and proof are this package's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fpgm.errors import ModelError, RequestError
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Criterion, Planner
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.verification import certify
from fpgm.tracing.residual import Residual
from fpgm.utils.calibration_data import Inputs, read_inputs
from fpgm.utils.example_inputs import beside
from fpgm.utils.modules import named_tensors
from fpgm.utils.progress import Progress
from fpgm.workflow.api import check_prunes

Batch = tuple[Tensor, Tensor]
"""Inputs and their classes."""

Needs = Literal["weights", "inputs", "labels", "training"]
"""What a method looks at: weights alone; inputs too; their classes too; or it trains."""


@dataclass(frozen=True)
class Schedule:
    """A short training by SGD: so many steps, the rate falling to zero along a cosine."""

    steps: int
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        >>> Schedule(4, lr=1.0).rate(2)
        0.5
        """
        return self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2


@dataclass(frozen=True)
class Task:
    """A trained model, how much of it is to go, and what may be looked at on the way."""

    model: nn.Module
    """Stays as it is."""
    example: Any
    macs: float
    """Share of the multiply-accumulates that goes."""
    loader: Iterable[Any] = ()
    """Batches of inputs and classes, to look at; can be read again."""
    training: Iterable[Any] | None = None
    """The same to train on, with whatever augmentation; a new epoch at every reading."""
    images: int = 512
    """Inputs to look at."""
    before: Schedule = field(default_factory=lambda: Schedule(100))
    """What methods that train before they prune may spend."""
    residual: Residual = "coupled"
    align: int = 1
    seed: int = 0
    progress: Progress | None = None

    def planner(
        self,
        criterion: Criterion = "l2",
        model: nn.Module | None = None,
        residual: Residual | None = None,
    ) -> Planner:
        """The task's model watched (or another with the same structure), with its budget."""
        return Planner(
            self.model if model is None else model,
            self.example,
            budget=Budget(macs=self.macs),
            criterion=criterion,
            residual=residual or self.residual,
            align=self.align,
            seed=self.seed,
        )

    def inputs(self) -> Inputs:
        """The inputs to look at; close them."""
        return read_inputs((beside(self.model, batch) for batch in self.loader), self.images)

    def labelled(self) -> Iterator[Batch]:
        """As many inputs with their classes."""
        seen = 0
        for batch in self.loader:
            x, classes = pair(beside(self.model, batch))
            yield x, classes
            seen += len(x)
            if seen >= self.images:
                return

    def copy(self) -> nn.Module:
        """The model to train; the task's own stays as it is."""
        return trainable(self.model)


@dataclass(frozen=True)
class Pruned:
    """What a method made: a smaller model with the weights the method gives it."""

    model: nn.Module
    macs_removed: float
    plan: Plan | None = None
    """None where nothing is removed but skipped while it runs."""
    trained: nn.Module | None = None
    """The model the plan was drawn for, if the method trained it first."""
    gone: Tensor | None = None
    """The planner's numbers of the classes that go."""
    saving: Callable[[nn.Module], float] | None = None
    """Measures `macs_removed` again, where it depends on weights."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """A way of pruning, by the name commands know it under."""

    name: str
    title: str
    cite: str
    about: str
    """What it does, in a sentence."""
    needs: Needs
    prune: Callable[[Task], Pruned]


def cut(planner: Planner) -> Pruned:
    """Plan, compact and prove; weights of what stays are as they were."""
    drawn = planner.draw()
    check_prunes(drawn.plan)
    small = compact(planner.model, drawn.plan)
    certify(planner.model, drawn.plan, planner.examples, small).check()
    return Pruned(small, drawn.plan.macs_removed, drawn.plan, gone=drawn.removed)


@torch.no_grad()
def scale_readers_(model: nn.Module, planner: Planner, factors: Tensor) -> None:
    """Multiply weights that read a unit by the factor of its class."""
    tensors = named_tensors(model)
    for slot in planner.structure.seen.slots.values():
        for labels, role in zip(slot.fields, slot.roles, strict=True):
            if role == "reads":
                weight = tensors[slot.name]
                weight.mul_(factors[planner.structure.of(labels)].to(weight))


def classes_of(planner: Planner) -> int:
    """How many classes of units there are to give scores to."""
    return int(planner.structure.classes.max()) + 1


def trainable(model: nn.Module) -> nn.Module:
    """A copy of which nothing is frozen: methods train whole networks."""
    net = copy.deepcopy(model)
    for parameter in net.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return net


def class_scores(model: nn.Module, x: Tensor) -> Tensor:
    """What a classifier answers, or why it is none."""
    found = model(x)
    if isinstance(found, Tensor):
        return found
    raise ModelError(
        f"The model answers with a {type(found).__name__}: to train it or to count what it gets "
        "right, wrap it so that it gives one tensor of class scores."
    )


def pair(batch: Any) -> Batch:
    """A batch of inputs and classes, or why it is none."""
    if (
        isinstance(batch, tuple | list)
        and len(batch) == 2
        and all(isinstance(t, Tensor) for t in batch)
        and not batch[1].is_floating_point()
    ):
        return batch[0], batch[1]
    raise RequestError("The loader gives batches without classes: give pairs of inputs and labels.")
