"""Where a model's time goes in PyTorch: every layer on its own, two models side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fpgm.examples import Example
from fpgm.latency.backends import torch_threads
from fpgm.latency.layers import called_layers
from fpgm.tensors import modules_by_path

_ROUNDS = 7
_WARM_UP = 2


@dataclass(frozen=True)
class Spent:
    """A layer in both models: its widths and its seconds."""

    path: str
    kind: str
    widths: tuple[tuple[int, int] | None, ...]
    """Channels read and written, where it is a convolution or linear layer, by model."""
    seconds: tuple[float, ...]
    multiplies: bool = True
    """Whether it has a matrix of weights; what has none waits for memory."""


@torch.no_grad()
def breakdown(models: Sequence[nn.Module], example: Example, threads: int) -> list[Spent]:
    """Seconds of every innermost module, in the order they first run; models take turns."""
    rounds: list[list[dict[str, float]]] = [[] for _ in models]
    with torch_threads(threads):
        for number in range(_WARM_UP + _ROUNDS):
            for place, model in enumerate(models):
                with _clocked(model) as times:
                    example.call(model)
                if number >= _WARM_UP:
                    rounds[place].append(dict(times))
    widths = [
        {c.path: (c.layer.reads, c.layer.writes) for c in called_layers(model, example)}
        for model in models
    ]
    modules = modules_by_path(models[0])
    return [
        Spent(
            path,
            type(modules[path]).__name__,
            tuple(own.get(path) for own in widths),
            tuple(statistics.median(r.get(path, 0.0) for r in own) for own in rounds),
            any(p.ndim > 1 for p in modules[path].parameters()),
        )
        for path in rounds[0][0]
    ]


@contextmanager
def _clocked(model: nn.Module) -> Iterator[dict[str, float]]:
    """Seconds by path of the modules that have no module inside, added up over their calls."""
    times: dict[str, float] = {}
    begun: dict[str, float] = {}
    handles = []

    def before(path: str) -> Any:
        def hook(*_: Any) -> None:
            begun[path] = time.perf_counter()

        return hook

    def after(path: str) -> Any:
        def hook(*_: Any) -> None:
            times[path] = times.get(path, 0.0) + time.perf_counter() - begun[path]

        return hook

    for path, module in modules_by_path(model).items():
        if not any(True for _ in module.children()):
            handles.append(module.register_forward_pre_hook(before(path), prepend=True))
            handles.append(module.register_forward_hook(after(path)))
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()
