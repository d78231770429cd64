"""The interface of the compared methods: `Task` in, `MethodResult` out.

All methods prune the same trained model by the same fraction of MACs with the same data. A method
decides which units to remove and may change weights. Finding the units that can be removed,
compaction and verification are the same code for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fpgm.errors import ModelError, RequestError
from fpgm.planning.budget import Budget
from fpgm.planning.options import Criterion, PlanOptions
from fpgm.planning.planner import Planner
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.verification import certify
from fpgm.tracing.residual import Residual
from fpgm.utils.calibration_data import Inputs, read_inputs
from fpgm.utils.example_inputs import to_model_device
from fpgm.utils.modules import named_tensors
from fpgm.utils.progress import Progress
from fpgm.utils.training_loop import cosine_decay
from fpgm.workflow.api import check_prunes

Batch = tuple[Tensor, Tensor]
"""Inputs and their labels."""

Needs = Literal["weights", "inputs", "labels", "training"]
"""What a method needs: weights only, inputs too, labels too, or training."""


@dataclass(frozen=True)
class SgdSchedule:
    """Hyperparameters of a short SGD training with a cosine learning rate."""

    steps: int
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4

    def rate(self, step: int) -> float:
        """Compute the learning rate of a step, counted from 0.

        >>> SgdSchedule(4, lr=1.0).rate(2)
        0.5
        """
        return self.lr * cosine_decay(step / self.steps)


@dataclass(frozen=True)
class Task:
    """A trained model, the pruning budget, and the data that a method may use."""

    model: nn.Module
    """Not changed by any method."""
    example: Any
    macs: float
    """Fraction of the MACs to remove."""
    loader: Iterable[Any] = ()
    """Batches of inputs and labels for calibration; iterable more than once."""
    training: Iterable[Any] | None = None
    """Batches to train on, possibly augmented; every iteration is a new epoch."""
    images: int = 512
    """Number of inputs for calibration."""
    before_pruning: SgdSchedule = field(default_factory=lambda: SgdSchedule(100))
    """Training budget of methods that train before they prune."""
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
        """Create a planner with the task's budget.

        Args:
            criterion: scores filters.
            model: another model of the same structure; the task's own by default.
            residual: overrides the task's setting.
        """
        return Planner(
            self.model if model is None else model,
            self.example,
            budget=Budget(macs=self.macs),
            options=PlanOptions(
                criterion=criterion,
                residual=residual or self.residual,
                align=self.align,
                seed=self.seed,
            ),
        )

    def inputs(self) -> Inputs:
        """Open the calibration inputs; the caller closes them."""
        return read_inputs(
            (to_model_device(self.model, batch) for batch in self.loader), self.images
        )

    def labelled_batches(self) -> Iterator[Batch]:
        """Iterate over batches of calibration inputs with their labels."""
        count = 0
        for batch in self.loader:
            x, classes = labelled_pair(to_model_device(self.model, batch))
            yield x, classes
            count += len(x)
            if count >= self.images:
                return

    def trainable_copy(self) -> nn.Module:
        """Copy the model for training."""
        return trainable_copy(self.model)


@dataclass(frozen=True)
class MethodResult:
    """The pruned model of a method, with the weights that the method gives it."""

    model: nn.Module
    macs_removed: float
    plan: Plan | None = None
    """None if the method removes nothing but skips computations (MIL)."""
    trained_model: nn.Module | None = None
    """The unpruned model that the plan is for, if the method trained it."""
    removed: Tensor | None = None
    """Indices of the removed unit classes in the planner's structure."""
    measure_saving: Callable[[nn.Module], float] | None = None
    """Measures `macs_removed` again after training, if it depends on weights."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """A pruning method and the name under which commands know it."""

    name: str
    title: str
    cite: str
    summary: str
    """One sentence about what it does."""
    needs: Needs
    prune: Callable[[Task], MethodResult]


def prune_and_verify(planner: Planner) -> MethodResult:
    """Plan, compact and verify; the kept weights are unchanged."""
    result = planner.build_plan()
    check_prunes(result.plan)
    small = compact(planner.model, result.plan)
    certify(planner.model, result.plan, planner.examples, small).check()
    return MethodResult(small, result.plan.macs_removed, result.plan, removed=result.removed)


@torch.no_grad()
def scale_consumers_(model: nn.Module, planner: Planner, factors: Tensor) -> None:
    """Multiply the weights that consume a unit by the factor of its class."""
    tensors = named_tensors(model)
    for info in planner.structure.trace.parameter_infos.values():
        for labels, role in zip(info.fields, info.roles, strict=True):
            if role == "reads":
                weight = tensors[info.name]
                weight.mul_(factors[planner.structure.classes_of(labels)].to(weight))


def num_unit_classes(planner: Planner) -> int:
    """Count the classes of units that need a score."""
    return int(planner.structure.classes.max()) + 1


def trainable_copy(model: nn.Module) -> nn.Module:
    """Copy a model and make all floating-point parameters trainable."""
    net = copy.deepcopy(model)
    for parameter in net.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return net


def class_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Run a classifier; raise a `ModelError` if its output is not one tensor."""
    output = model(x)
    if isinstance(output, Tensor):
        return output
    raise ModelError(
        f"The model returns a {type(output).__name__}: training and accuracy need logits. Wrap the "
        "model so that it returns one tensor of class scores."
    )


def labelled_pair(batch: Any) -> Batch:
    """Check that a batch is a pair of inputs and integer labels, and return the pair."""
    if (
        isinstance(batch, tuple | list)
        and len(batch) == 2
        and all(isinstance(t, Tensor) for t in batch)
        and not batch[1].is_floating_point()
    ):
        return batch[0], batch[1]
    raise RequestError("The loader yields batches without labels: give pairs of inputs and labels.")
