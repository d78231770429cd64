"""How much memory a model needs to run: its weights, and what it computes with at the worst moment.

PyTorch tells every allocation to its profiler. Other runtimes are asked from outside: a process
that does nothing else loads the model and runs it, and the system knows how much larger it got.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fpgm.utils.modules import named_tensors

_CHILD = Path(__file__).with_name("_memory_probe.py")
_LOG = "KINETO_LOG_LEVEL"
_PATIENCE = 120
"""Seconds for a process to load a model and run it."""


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's tensors, those it shares counted once."""
    return sum(t.nbytes for t in named_tensors(model).values())


def torch_bytes(model: nn.Module, run: Callable[[], Any]) -> int:
    """Weights, and the most that is allocated at once while `run` runs the model."""
    run()
    on_cuda = any(p.is_cuda for p in model.parameters())
    return weight_bytes(model) + (_cuda_bytes(run) if on_cuda else _cpu_bytes(run))


def _cuda_bytes(run: Callable[[], Any]) -> int:
    """The most that is allocated at once beyond what was before, which others hold, too."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def _cpu_bytes(run: Callable[[], Any]) -> int:
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        run()
    kineto = told.profiler.kineto_results if told.profiler is not None else None
    events = [] if kineto is None else kineto.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    worst = held = 0
    for _, change in changes:
        held += change
        worst = max(worst, held)
    return worst


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler from writing to the terminal when it starts."""
    if _LOG in os.environ:
        yield
        return
    os.environ[_LOG] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG]


def process_bytes(runtime: str, model: bytes, feed: Mapping[str, Any], threads: int) -> int | None:
    """By how much a process grows that runs a model in ONNX; None where that cannot be told."""
    if not sys.platform.startswith("linux"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        file, inputs = Path(folder) / "model.onnx", Path(folder) / "inputs.npz"
        file.write_bytes(model)
        np.savez(inputs, **feed)
        try:
            done = subprocess.run(
                [sys.executable, str(_CHILD), runtime, str(file), str(inputs), str(threads)],
                capture_output=True, text=True, timeout=_PATIENCE, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
    told = done.stdout.split()
    return int(told[-1]) if done.returncode == 0 and told else None
