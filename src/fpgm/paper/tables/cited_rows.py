"""Reproduce rows that the paper cites from other papers, with our implementation of their method.

The method prunes a trained network. The result is fine-tuned, or, in a row from scratch, its
structure is trained from random weights, as in the cited papers. MIL removes nothing; its network
is trained with cheap layers from random weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fpgm.data.base import SINGLE_PROCESS
from fpgm.data.loaders import Epochs, FirstEpoch
from fpgm.data.registry import DataSpec, open_splits
from fpgm.errors import ModelError
from fpgm.models.registry import default_shape
from fpgm.paper.baselines.mil import attach_cheap_layers_, describe_zeros, macs_saving, zero_ratios
from fpgm.paper.baselines.registry import METHODS, SgdSchedule, Task
from fpgm.paper.tables.table_schema import TableRow
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.serialization import read_plans, save
from fpgm.utils.example_inputs import as_examples
from fpgm.utils.progress import Progress
from fpgm.utils.thread_lock import GLOBAL_LOCK

CALIBRATION_IMAGES = 5_000
"""Training images for calibration; CP and ThiNet use as many or more."""
CALIBRATION_BATCH = 32
"""Batch size for calibration, as some methods store the outputs of every layer."""
TRAIN_EPOCHS = 2
"""Epochs of training before pruning, for methods that train."""
TRAIN_BATCH = 64
"""Batch size of that training, which runs in one process."""
WARMUP_FRACTION = 0.03
"""Fraction of MIL's epochs with a tenth of the learning rate, as in the authors' code."""
INITIALIZATION = "silent blocks"
"""Name of MIL's initialization, which is part of the identity of a training."""


def choice_digest(row: TableRow) -> str:
    """Hash what pruning depends on besides the network, its weights and the seed."""
    text = json.dumps(
        [row.key, row.macs, CALIBRATION_IMAGES, CALIBRATION_BATCH, TRAIN_EPOCHS, TRAIN_BATCH]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def prune_network(
    row: TableRow,
    model: nn.Module,
    data: DataSpec,
    seed: int,
    fresh: Callable[[], nn.Module],
    file: Path,
    progress: Progress | None = None,
) -> None:
    """Prune a trained network with the row's method and save the compact model.

    Args:
        row: names the method and the fraction of MACs to remove.
        model: the trained network.
        data: the data set.
        seed: of the method, and of the random weights.
        fresh: builds a network with random weights, which a row from scratch starts from.
        file: where to save.
        progress: receives the progress.
    """
    task = replace(_task(row, model, data, seed), progress=progress)
    pruned = METHODS[row.method].prune(task)
    small = pruned.model
    if row.start == "scratch":
        assert pruned.plan is not None
        torch.manual_seed(seed)
        small = compact(fresh(), pruned.plan)
    file.parent.mkdir(parents=True, exist_ok=True)
    save(small, file)


def read_pruning_plan(file: Path) -> Plan:
    """Read the plan from a file that `prune_network` saved."""
    (plan,) = read_plans(file)[""]
    return plan


def build_collaborative(row: TableRow, fresh: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a residual network with MIL's cheap layers, initialized as in the authors' code.

    The product of two layers amplifies large values, and their sum over residual blocks explodes:
    the first losses of a ResNet-32 are in the hundreds. The authors' networks normalize the stream
    before each block; here the last batch norm of each block starts at zero instead.
    """
    model = fresh()
    example = as_examples(_example(row))[0]
    added = attach_cheap_layers_(model, example, shared=True, seed=seed)
    if not added:
        raise ModelError(
            f"{row.key}: the network has no convolution that MIL could add a cheap layer to; do "
            "not change model.name."
        )
    with GLOBAL_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in added.values():
            layer.norm.reset_parameters()  # the network is not trained yet
            nn.init.kaiming_normal_(layer.cheap.weight, mode="fan_out")
    for block in model.modules():
        if type(block).__name__ == "BasicBlock":  # this package's and torchvision's
            assert isinstance(block.bn2, nn.BatchNorm2d)
            nn.init.zeros_(block.bn2.weight)
    return model


def warmup_epochs(epochs: int) -> int:
    """Compute the number of warmup epochs of a MIL training: at least 1, but never all epochs.

    >>> [warmup_epochs(epochs) for epochs in (200, 100, 3, 1)]
    [5, 2, 1, 0]
    """
    return min(max(math.ceil(WARMUP_FRACTION * epochs) - 1, 1), epochs - 1)


def mil_saving(row: TableRow, model: nn.Module, data: DataSpec) -> tuple[float, str]:
    """Measure the fraction of MACs that MIL's zeros save, and describe the zeros in a sentence."""
    inputs = _task(row, model, data, 0).inputs()
    try:
        zeros = zero_ratios(model, inputs)
    finally:
        inputs.close()
    device = next(model.parameters()).device
    return macs_saving(model, as_examples(_example(row).to(device))[0], zeros), describe_zeros(
        zeros
    )


def _example(row: TableRow) -> Tensor:
    """Create one random input, always the same."""
    return torch.randn(default_shape(row.network), generator=torch.Generator().manual_seed(0))


def _task(row: TableRow, model: nn.Module, data: DataSpec, seed: int) -> Task:
    device = next(model.parameters()).device
    augmented = open_splits(
        replace(data, batch=min(data.batch, TRAIN_BATCH)), seed, SINGLE_PROCESS, device
    )
    batch = min(data.batch, CALIBRATION_BATCH)
    plain_settings = replace(data, batch=batch, crop=0, flip=False, cutout=0)
    plain = open_splits(plain_settings, seed, SINGLE_PROCESS, device)
    return Task(
        model,
        _example(row).to(device),
        row.macs,
        loader=FirstEpoch(plain),
        training=Epochs(augmented, seed),
        images=CALIBRATION_IMAGES,
        before_pruning=SgdSchedule(TRAIN_EPOCHS * len(augmented.train)),
        residual="independent",
        seed=seed,
    )
