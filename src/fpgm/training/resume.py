"""Resume a run after a crash: collect all that the next epoch depends on, and restore it.

`checkpoints` writes this state to a file and finds the newest intact one; `trainer` calls both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from torch import nn

from fpgm.errors import FileError
from fpgm.training.ema import ExponentialAverage
from fpgm.utils.rng import random_state, restore_random_state
from fpgm.utils.text import reason
from fpgm.workflow.soft_pruner import SoftPruner


class ResumableRun(Protocol):
    """What a run has that changes while it trains."""

    epoch: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: ExponentialAverage | None
    pruner: SoftPruner | None
    accelerator: Any


def run_state(run: ResumableRun) -> dict[str, Any]:
    """Collect the state of a run, with the random state of all its processes."""
    scaler = run.accelerator.scaler
    return {
        "epoch": run.epoch,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "average": None if run.average is None else run.average.state_dict(),
        "pruner": None if run.pruner is None else run.pruner.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": gather_object([random_state()]),
    }


def restore_run_(run: ResumableRun, state: dict[str, Any], folder: Path) -> None:
    """Restore a state; the error names the folder if it is of another network."""
    try:
        _restore_(run, state)
    except Exception as error:
        raise FileError(
            f"The checkpoints in {folder} do not fit the network as it is now "
            f"({reason(error)}): undo the change, or choose another folder."
        ) from error


def _restore_(run: ResumableRun, state: dict[str, Any]) -> None:
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    if run.average is not None:
        run.average.load_state_dict(state["average"])
    if run.pruner is not None:
        run.pruner.load_state_dict(state["pruner"])
    if run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    if len(state["random"]) == run.accelerator.num_processes:
        restore_random_state(state["random"][run.accelerator.process_index])
    run.epoch = int(state["epoch"])
