"""One model, one budget, several methods: what each keeps at once, recovered, and trained on.

Every method prunes the same model to the same share of MACs. What comes of it is counted three
times: as the method leaves it, with its choice of units recovered by `fpgm.recover`, and after a
training that is as long for all, what a method spent before it pruned included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from fpgm.paper.baselines.base import Method, Pruned, Schedule, Task, trainable
from fpgm.paper.baselines.short_training import train_
from fpgm.pruning.plan import Plan
from fpgm.recovery.recover import recover

Count = Callable[[nn.Module], float]
"""A model's accuracy."""


@dataclass(frozen=True)
class Row:
    """What came of one method with one seed."""

    method: str
    seed: int
    macs_removed: float
    once: float
    """Accuracy as the method leaves it, before any training that follows pruning."""
    recovered: float | None
    """With its units gone from the original, recovered without training; None where none are, or
    where that was not asked for."""
    tuned: float | None
    """After the training that all are given; None if there was none."""
    steps: int
    """Of training in all, before and after pruning."""
    seconds: float
    """Of the method itself."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Compared:
    """A row, and the models behind it."""

    row: Row
    pruned: Pruned
    best: nn.Module
    """The most accurate of what was made: trained on, recovered, or as the method left it."""

    @property
    def plan(self) -> Plan | None:
        """Which units went."""
        return self.pruned.plan


def compare(
    method: Method, task: Task, tuning: Schedule, accuracy: Count, *, recovering: bool = True
) -> Compared:
    """Prune, recover, train on; the task's model stays as it is.

    A method that trains before it prunes has that much less training left: `tuning` is for all.
    """
    torch.manual_seed(task.seed)
    spent = min(task.before.steps, tuning.steps) if method.needs == "training" else 0
    task = replace(task, before=replace(task.before, steps=spent))
    start = time.perf_counter()
    pruned = method.prune(task)
    seconds = time.perf_counter() - start
    once = accuracy(pruned.model.eval())
    made, recovered, tuned = [(once, pruned.model)], None, None
    if recovering and pruned.plan is not None and task.loader != ():
        # From the original, whatever the method trained: a zeroed network has nothing to give back.
        solved = recover(task.model, pruned.plan, task.loader, images=task.images).eval()
        recovered = accuracy(solved)
        made.append((recovered, solved))
    left = tuning.steps - spent
    if left > 0:
        net = trainable(pruned.model)
        train_(net, task, replace(tuning, steps=left), title=f"{method.name}: training on")
        tuned = accuracy(net)
        made.append((tuned, net))
    _, best = max(made, key=lambda own: own[0])
    removed = pruned.macs_removed if pruned.saving is None else pruned.saving(made[-1][1])
    row = Row(
        method.name, task.seed, removed, once, recovered, tuned,
        spent + max(0, left), round(seconds, 1), pruned.notes,
    )  # fmt: skip
    return Compared(row, pruned, best)
