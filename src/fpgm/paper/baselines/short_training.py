"""The short training every method is given: plain SGD, with places to step in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fpgm.errors import ModelError, RequestError
from fpgm.paper.baselines.base import Batch, Schedule, Task, class_scores, pair
from fpgm.utils.example_inputs import beside
from fpgm.workflow.soft_pruner import SoftPruner

Hook = Callable[[float], None]
"""Called with the learning rate."""


def train_(
    model: nn.Module,
    task: Task,
    schedule: Schedule,
    *,
    begin: Callable[[torch.optim.Optimizer], None] | None = None,
    penalise: Hook | None = None,
    settle: Hook | None = None,
    title: str = "training",
) -> None:
    """Train a classifier in place: cross-entropy, SGD, as many steps as the schedule has.

    `begin` is shown the optimizer, `penalise` may add to gradients before a step, `settle` may move
    weights after it. The model is left in eval mode.
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
    if begin is not None:
        begin(optimizer)
    model.train()
    with torch.enable_grad():
        for step, (x, classes) in enumerate(itertools.islice(_epochs(task), schedule.steps)):
            if task.progress is not None:
                task.progress(title, step, schedule.steps)
            rate = schedule.rate(step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = F.cross_entropy(class_scores(model, x), classes)
            if not bool(loss.isfinite()):
                told = float(loss.detach())
                raise ModelError(f"The loss is {told} at step {step + 1}: lower lr.")
            loss.backward()
            if penalise is not None:
                penalise(rate)
            optimizer.step()
            if settle is not None:
                with torch.no_grad():
                    settle(rate)
    optimizer.zero_grad()
    model.eval()


def _epochs(task: Task) -> Iterator[Batch]:
    """Labelled batches without end."""
    loader = task.loader if task.training is None else task.training
    while True:
        batch = None
        for batch in loader:
            yield pair(beside(task.model, batch))
        if batch is None:
            raise RequestError("The loader gives nothing: training needs batches.")


def train_pruning_(
    model: nn.Module,
    task: Task,
    schedule: Schedule,
    rounds: int,
    title: str = "training",
    **options: Any,
) -> SoftPruner | None:
    """Train, and let a `SoftPruner` with these options prune so many times on the way.

    None if there is nothing to train: the optimizer is what a pruner starts with.
    """
    pruners: list[SoftPruner] = []
    done = 0

    def begin(optimizer: torch.optim.Optimizer) -> None:
        pruners.append(SoftPruner(model, task.example, optimizer=optimizer, **options))

    def settle(_: float) -> None:
        nonlocal done
        done += 1
        if done * rounds // schedule.steps > pruners[0].epoch:
            pruners[0].step()

    train_(model, task, schedule, begin=begin, settle=settle, title=title)
    return pruners[0] if pruners else None
