"""The short SGD training that methods and fine-tuning use, with callbacks around each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fpgm.errors import ModelError, RequestError
from fpgm.paper.baselines.base import Batch, SgdSchedule, Task, class_logits, labelled_pair
from fpgm.utils.example_inputs import to_model_device
from fpgm.utils.training_loop import train_steps
from fpgm.workflow.soft_pruner import SoftPruner

StepHook = Callable[[float], None]
"""Called with the learning rate of the step."""


def train_(
    model: nn.Module,
    task: Task,
    schedule: SgdSchedule,
    *,
    on_start: Callable[[torch.optim.Optimizer], None] | None = None,
    before_step: StepHook | None = None,
    after_step: StepHook | None = None,
    title: str = "training",
) -> None:
    """Train a classifier in place with SGD and cross-entropy, and leave it in eval mode.

    Args:
        model: the classifier to train.
        task: provides the batches and the progress callback.
        schedule: number of steps and hyperparameters.
        on_start: called with the optimizer.
        before_step: called after the backward pass; may change gradients.
        after_step: called after the optimizer's step; may change weights.
        title: shown with the progress.
    """
    if schedule.steps < 1:
        model.eval()
        return
    optimizer = torch.optim.SGD(
        model.parameters(),
        schedule.lr,
        momentum=schedule.momentum,
        nesterov=True,
        weight_decay=schedule.weight_decay,
    )
    if on_start is not None:
        on_start(optimizer)

    def backward(step: int, batch: Batch) -> bool:
        if task.progress is not None:
            task.progress(title, step, schedule.steps)
        x, classes = batch
        loss = F.cross_entropy(class_logits(model, x), classes)
        if not bool(loss.isfinite()):
            value = float(loss.detach())
            raise ModelError(f"The loss is {value} at step {step + 1}: try a lower lr.")
        loss.backward()
        if before_step is not None:
            before_step(schedule.rate(step))
        return True

    def after(step: int) -> None:
        if after_step is not None:
            with torch.no_grad():
                after_step(schedule.rate(step))

    model.train()
    with torch.enable_grad():
        batches = itertools.islice(_repeat_batches(task), schedule.steps)
        train_steps(batches, optimizer, schedule.rate, backward, after)
    model.eval()


def _repeat_batches(task: Task) -> Iterator[Batch]:
    """Yield labelled batches, epoch after epoch."""
    loader = task.loader if task.training is None else task.training
    while True:
        batch = None
        for batch in loader:
            yield labelled_pair(to_model_device(task.model, batch))
        if batch is None:
            raise RequestError("The loader is empty: training needs batches.")


def train_and_prune_(
    model: nn.Module,
    task: Task,
    schedule: SgdSchedule,
    rounds: int,
    title: str = "training",
    **options: Any,
) -> SoftPruner | None:
    """Train a model while a `SoftPruner` prunes it at regular intervals.

    Returns the pruner, or None if the schedule has no steps.

    Args:
        model: trained in place.
        task: provides the batches.
        schedule: of the training.
        rounds: number of pruning steps.
        title: shown with the progress.
        options: of `SoftPruner`.
    """
    pruners: list[SoftPruner] = []
    step = 0

    def create_pruner(optimizer: torch.optim.Optimizer) -> None:
        pruners.append(SoftPruner(model, task.example, optimizer=optimizer, **options))

    def prune_on_schedule(_: float) -> None:
        nonlocal step
        step += 1
        if step * rounds // schedule.steps > pruners[0].epoch:
            pruners[0].step()

    train_(model, task, schedule, on_start=create_pruner, after_step=prune_on_schedule, title=title)
    return pruners[0] if pruners else None
