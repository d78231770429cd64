"""Small training runs: a network, a recipe, and processes that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpgm.models.checkpoint import read_weights
from fpgm.training import Recipe
from fpgm.training.recipe import make_recipe

TINY = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), {norm}nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout({dropout}), nn.Linear(64, 10),
    )
"""
BASE: dict[str, Any] = {
    "data": {"name": "synthetic", "batch": 32},
    "train": {"epochs": 3, "lr": 0.1, "momentum": 0.9},
    "prune": {"rate": 0.4, "align": 1},
}


def write_net(folder: Path, norm: str, dropout: float) -> str:
    file = folder / "tiny.py"
    file.write_text(TINY.format(norm=norm, dropout=dropout))
    return f"{file}:make"


def recipe(model: str, **parts: Any) -> Recipe:
    """The base recipe with some options replaced; a part that is None is left out."""
    table = {"model": {"name": model}, **BASE}
    for part, options in parts.items():
        table[part] = {**table.get(part, {}), **options} if isinstance(options, dict) else options
    return make_recipe({k: v for k, v in table.items() if v is not None})


def weights(folder: Path, name: str = "small.safetensors") -> dict[str, Tensor]:
    return read_weights(folder / name)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def start(file: Path, out: Path, *launcher: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own, or several; what it says goes to a file beside `out`."""
    command = ["-m", "fpgm", "train", str(file), "--allow-code", "--out", str(out)]
    with said(out).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def said(out: Path) -> Path:
    return out.with_suffix(".log")


def finish(file: Path, out: Path, *launcher: str) -> str:
    """A run to its end, and what it said."""
    with start(file, out, *launcher) as run:
        try:
            code = run.wait(timeout=240)
        finally:
            kill(run)
    text = said(out).read_text()
    assert code == 0, text
    return text


def kill(run: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def write_recipe(folder: Path, model: str, epochs: int = 8) -> Path:
    file = folder / "recipe.toml"
    file.write_text(
        f'[model]\nname = "{model}"\n'
        '[data]\nname = "synthetic"\nbatch = 16\ncrop = 2\nflip = true\n'
        f"[train]\nepochs = {epochs}\nlr = 0.05\nmomentum = 0.9\nema = 0.9\n"
        '[prune]\nrate = 0.4\nalign = 1\nmode = "hard"\n'
    )
    return file
