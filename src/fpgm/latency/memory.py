"""Measure the peak memory a model needs to run: weights and activations.

In PyTorch, the profiler reports every allocation. For other runtimes, a separate process loads and
runs the model, and the operating system reports its growth.
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

_PROBE_SCRIPT = Path(__file__).with_name("_memory_probe.py")
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_TIMEOUT_SECONDS = 120
"""For a process to load a model and run it."""


def weight_bytes(model: nn.Module) -> int:
    """Sum the bytes of a model's tensors; shared ones count once."""
    return sum(t.nbytes for t in named_tensors(model).values())


def torch_bytes(model: nn.Module, run: Callable[[], Any]) -> int:
    """Measure peak bytes in PyTorch: weights, and allocations while `run` runs the model."""
    run()
    on_cuda = any(p.is_cuda for p in model.parameters())
    return weight_bytes(model) + (_cuda_bytes(run) if on_cuda else _cpu_bytes(run))


def _cuda_bytes(run: Callable[[], Any]) -> int:
    """Measure the peak beyond what is allocated already, by the model or by others."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def _cpu_bytes(run: Callable[[], Any]) -> int:
    """Add up the profiler's allocations and frees in order, and return the peak."""
    activities = [ProfilerActivity.CPU]
    with _quiet_profiler(), profile(activities=activities, profile_memory=True) as profiled:
        run()
    kineto = profiled.profiler.kineto_results if profiled.profiler is not None else None
    events = [] if kineto is None else kineto.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = allocated = 0
    for _, change in changes:
        allocated += change
        peak = max(peak, allocated)
    return peak


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler from writing to the terminal when it starts."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


def process_bytes(runtime: str, model: bytes, feed: Mapping[str, Any], threads: int) -> int | None:
    """Measure by how many bytes a process grows that runs an ONNX model; None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        file, inputs = Path(folder) / "model.onnx", Path(folder) / "inputs.npz"
        file.write_bytes(model)
        np.savez(inputs, **feed)
        try:
            result = subprocess.run(
                [sys.executable, str(_PROBE_SCRIPT), runtime, str(file), str(inputs), str(threads)],
                capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
    words = result.stdout.split()
    return int(words[-1]) if result.returncode == 0 and words else None
