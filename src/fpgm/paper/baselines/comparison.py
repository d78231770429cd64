"""Compare methods on one model at one budget: one-shot, recovered, and fine-tuned accuracy.

Every method prunes the same model by the same fraction of MACs. Accuracy is measured three times:
of the model that the method returns, of the original with the same units removed and recovered by
`fpgm.recover`, and after fine-tuning. All methods have the same number of training steps in total,
including those that a method takes before it prunes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from fpgm.paper.baselines.base import Method, MethodResult, SgdSchedule, Task, trainable_copy
from fpgm.paper.baselines.short_training import train_
from fpgm.pruning.plan import Plan
from fpgm.recovery.api import recover

AccuracyFunction = Callable[[nn.Module], float]
"""Measures a model's accuracy."""


@dataclass(frozen=True)
class ComparisonRow:
    """The result of one method with one seed."""

    method: str
    seed: int
    macs_removed: float
    once: float
    """Accuracy of the method's model, before any training after pruning."""
    recovered: float | None
    """Accuracy of the original without the same units, recovered without training; None if the
    method removes no units, or recovery was not requested."""
    tuned: float | None
    """Accuracy after fine-tuning; None if there was none."""
    steps: int
    """Training steps before and after pruning."""
    seconds: float
    """Time that the method itself took."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class ComparisonResult:
    """A row of the comparison, and its models."""

    row: ComparisonRow
    pruned: MethodResult
    best_model: nn.Module
    """The most accurate of the one-shot, recovered and fine-tuned models."""

    @property
    def plan(self) -> Plan | None:
        """Which units were removed."""
        return self.pruned.plan


def compare(
    method: Method,
    task: Task,
    tuning: SgdSchedule,
    accuracy: AccuracyFunction,
    *,
    with_recovery: bool = True,
) -> ComparisonResult:
    """Prune a model with one method, recover it, fine-tune it, and measure accuracy each time.

    Args:
        method: the method.
        task: the model, which is not changed, its budget and data.
        tuning: the training budget; steps that a method takes before pruning are subtracted.
        accuracy: measures a model.
        with_recovery: also recover the original without the removed units.
    """
    torch.manual_seed(task.seed)
    pre_steps = min(task.before_pruning.steps, tuning.steps) if method.needs == "training" else 0
    task = replace(task, before_pruning=replace(task.before_pruning, steps=pre_steps))
    start = time.perf_counter()
    pruned = method.prune(task)
    seconds = time.perf_counter() - start
    once = accuracy(pruned.model.eval())
    candidates, recovered, tuned = [(once, pruned.model)], None, None
    if with_recovery and pruned.plan is not None and task.loader != ():
        # From the original, not from the model that the method trained, whose removed units are
        # zero: nothing could be recovered from them.
        recovered_model = recover(task.model, pruned.plan, task.loader, images=task.images).eval()
        recovered = accuracy(recovered_model)
        candidates.append((recovered, recovered_model))
    remaining = tuning.steps - pre_steps
    if remaining > 0:
        net = trainable_copy(pruned.model)
        train_(net, task, replace(tuning, steps=remaining), title=f"{method.name}: fine-tuning")
        tuned = accuracy(net)
        candidates.append((tuned, net))
    _, best = max(candidates, key=lambda pair: pair[0])
    removed = (
        pruned.macs_removed
        if pruned.measure_saving is None
        else pruned.measure_saving(candidates[-1][1])
    )
    row = ComparisonRow(
        method.name, task.seed, removed, once, recovered, tuned,
        pre_steps + max(0, remaining), round(seconds, 1), pruned.notes,
    )  # fmt: skip
    return ComparisonResult(row, pruned, best)
