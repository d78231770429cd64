"""Rows at the paper's scale: the recipe behind each, its command, and how long it takes.

Hours are a calculation, not a measurement: three times the forward pass's MACs for every picture of
every epoch, at a rate that is stated.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fpgm.paper as counted
from fpgm.recipes import SHIPPED
from fpgm.reproduce.printed import Row, Table
from fpgm.reproduce.quick import pfec_rates
from fpgm.reproduce.results import Made

SPEED = 2.5e12
"""Multiply-accumulates a second that one current GPU really does in such a training."""
LEAST = 8.0
"""Seconds of an epoch on CIFAR-10 that no GPU goes below: its kernels are too small."""
PICTURES = {"cifar10": 50_000, "imagenet": 1_281_167}
EPOCHS = {"cifar10": 200, "imagenet": 100, "vgg16": 160}


def command(table: Table, row: Row, out: Path) -> str | None:
    """What makes a row, on one GPU or, behind `accelerate launch`, on many."""
    if row.recipe is None:
        return None
    return shlex.join(
        ["accelerate", "launch", "-m", "fpgm", "reproduce", table.name, "--scale", "full",
         "--rows", row.key, "--out", str(out)]
    )  # fmt: skip


def hours(row: Row) -> float | None:
    """Of one GPU, by calculation."""
    if row.recipe is None:
        return None
    if row.network == "vgg16":
        layers, kind, epochs = counted.cifar_vgg16(), "cifar10", EPOCHS["vgg16"]
    elif row.network.startswith("torchvision:resnet"):
        depth = int(row.network.removeprefix("torchvision:resnet"))
        layers, kind, epochs = counted.imagenet_resnet(depth), "imagenet", EPOCHS["imagenet"]
    else:
        depth = int(row.network.removeprefix("resnet"))
        layers, kind, epochs = counted.cifar_resnet(depth), "cifar10", EPOCHS["cifar10"]
    seconds = 3 * counted.macs(layers) * PICTURES[kind] / SPEED
    return epochs * max(seconds, LEAST if kind == "cifar10" else 0.0) / 3600


def weights_name(row: Row) -> str:
    """How the file of a network's trained weights is called.

    >>> from fpgm.reproduce.printed import TABLES
    >>> weights_name(TABLES["table1"].rows[-1])
    'cifar10_resnet110.safetensors'
    """
    network = row.network.removeprefix("torchvision:")
    return f"{'imagenet' if network != row.network else 'cifar10'}_{network}.safetensors"


def make(row: Row, seed: int, out: Path, weights: Path, changes: Sequence[str]) -> Made | None:
    """Train by the row's recipe, or go on with it; None where there is none.

    Rows that start from trained weights find them in a folder, unless `changes` name a file.
    """
    if row.recipe is None:
        return None
    from fpgm.train import read_recipe, train

    given = [*row.changes, f"seed={seed}", *changes]
    if row.start == "trained" and not any(own.startswith("model.weights=") for own in changes):
        given.append(f"model.weights={weights / weights_name(row)}")
    recipe = read_recipe(SHIPPED / f"{row.recipe}.toml", given)
    if row.network == "vgg16" and row.rate is None and recipe.prune is not None:
        recipe = replace(recipe, prune=replace(recipe.prune, rate=None, rates=pfec_rates()))
    start = time.perf_counter()
    results: dict[str, Any] = train(recipe, out / f"{row.key}.{seed}").results
    saved = 100 * (1 - results["macs_after"] / results["macs_before"])
    accuracy = 100 * results["accuracy"]
    column = next((c for c in ("accuracy", "pruned top-1", "160 epochs") if c in row.printed), "")
    return Made(
        {column: accuracy, "FLOPs": saved},
        round(time.perf_counter() - start, 1),
        f"{row.recipe}, {recipe.train.epochs} epochs",
    )
