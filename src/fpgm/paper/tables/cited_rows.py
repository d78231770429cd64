"""Rows that the paper quotes from other papers, made by this package's version of their method.

The method chooses by a trained network's weights and by pictures. What it leaves is fine-tuned, or,
in a row from scratch, its structure is trained from fresh weights: so those papers' own such rows
came to be. MIL removes nothing; its network is trained with cheap layers from fresh weights.
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

from fpgm.data.base import ALONE
from fpgm.data.loaders import Epochs, Once
from fpgm.data.registry import Wanted, open_sets
from fpgm.errors import ModelError
from fpgm.models.registry import default_shape
from fpgm.paper.baselines.mil import attach_, in_words, saving, zero_ratios
from fpgm.paper.baselines.registry import METHODS, Schedule, Task
from fpgm.paper.tables.table_schema import Row
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.serialization import read_plans, save
from fpgm.utils.example_inputs import as_examples
from fpgm.utils.locking import TURN
from fpgm.utils.progress import Progress

IMAGES = 5_000
"""Training pictures that a method may look at; CP and ThiNet have as many or more."""
LOOKED = 32
"""Of them at once: some methods keep what every layer gives out."""
EPOCHS = 2
"""Of training, for a method that trains before it prunes."""
TRAINED = 64
"""Pictures at once in that training, which one process does alone."""
WARM = 0.03
"""Share of MIL's epochs that come first with a tenth of the rate, as in its authors' code."""
START = "silent blocks"
"""How MIL's network begins: with another start it is another training."""


def digest(row: Row) -> str:
    """What a choice depends on besides the network, its weights and the seed."""
    text = json.dumps([row.key, row.macs, IMAGES, LOOKED, EPOCHS, TRAINED])
    return hashlib.sha256(text.encode()).hexdigest()


def choose(
    row: Row,
    model: nn.Module,
    data: Wanted,
    seed: int,
    fresh: Callable[[], nn.Module],
    file: Path,
    progress: Progress | None = None,
) -> None:
    """Prune a trained network by the row's method, prove it, and leave the smaller one in a file.

    It has the weights the method gives it; in a row from scratch, those of a fresh network.
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


def chosen(file: Path) -> Plan:
    """What went, by the file that `choose` left."""
    (plan,) = read_plans(file)[""]
    return plan


def collaborative(row: Row, fresh: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A fresh residual network with MIL's cheap layers, which begin as its authors' do.

    A product of two layers squares what is large, and a stream of such products, each normed by
    itself, explodes: the first losses of a ResNet-32 are hundreds. The authors' networks norm the
    stream before each block; in ours what a block adds to it begins at zero instead.
    """
    model = fresh()
    example = as_examples(_example(row))[0]
    added = attach_(model, example, shared=True, seed=seed)
    if not added:
        raise ModelError(
            f"{row.key}: the network has no convolution that MIL could put a cheap layer beside; "
            "leave model.name as it is."
        )
    with TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in added.values():
            layer.norm.reset_parameters()  # there is no trained function to stay near
            nn.init.kaiming_normal_(layer.cheap.weight, mode="fan_out")
    for block in model.modules():
        if type(block).__name__ == "BasicBlock":  # this package's and torchvision's
            assert isinstance(block.bn2, nn.BatchNorm2d)
            nn.init.zeros_(block.bn2.weight)
    return model


def slow_start(epochs: int) -> int:
    """Epochs of a MIL training that come first with a tenth of the rate.

    At least one, wherever there is another one behind it.

    >>> slow_start(200), slow_start(100), slow_start(3), slow_start(1)
    (5, 2, 1, 0)
    """
    return min(max(math.ceil(WARM * epochs) - 1, 1), epochs - 1)


def skipped(row: Row, model: nn.Module, data: Wanted) -> tuple[float, str]:
    """Share of the network's MACs that zeros of MIL's cheap layers save, and the zeros in words."""
    inputs = _task(row, model, data, 0).inputs()
    try:
        zeros = zero_ratios(model, inputs)
    finally:
        inputs.close()
    device = next(model.parameters()).device
    return saving(model, as_examples(_example(row).to(device))[0], zeros), in_words(zeros)


def _example(row: Row) -> Tensor:
    """One input, always the same."""
    return torch.randn(default_shape(row.network), generator=torch.Generator().manual_seed(0))


def _task(row: Row, model: nn.Module, data: Wanted, seed: int) -> Task:
    device = next(model.parameters()).device
    moved = open_sets(replace(data, batch=min(data.batch, TRAINED)), seed, ALONE, device)
    looked = replace(data, batch=min(data.batch, LOOKED), crop=0, flip=False)
    still = open_sets(looked, seed, ALONE, device)
    return Task(
        model,
        _example(row).to(device),
        row.macs,
        loader=Once(still),
        training=Epochs(moved, seed),
        images=IMAGES,
        before=Schedule(EPOCHS * len(moved.train)),
        residual="independent",
        seed=seed,
    )
