"""Time every layer of models in PyTorch, side by side.

Time outside of layers (functional activations, additions, gathers and scatters of adapters) is the
time of the model minus that of its layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fpgm.latency.backends import torch_threads
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.example_inputs import Example
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import modules_by_path

BETWEEN_LAYERS = "between layers"
"""Stands for a path: time of the model in which no layer runs."""
_ROUNDS = 7
_WARM_UP = 2


@dataclass(frozen=True)
class LayerTime:
    """Widths and seconds of a layer in all models, or of the code between layers."""

    path: str
    kind: str
    widths: tuple[tuple[int, int] | None, ...]
    """Input and output channels by model, for convolutions and linear layers."""
    seconds: tuple[float, ...]
    multiplies: bool = True
    """Whether it has a weight matrix; layers without one are memory-bound."""
    at_most: tuple[bool, ...] = ()
    """By model, whether the time is only an upper bound, because of noise."""

    def is_bound(self, model: int) -> bool:
        """Tell whether the seconds of a model, given by index, are only an upper bound."""
        return bool(self.at_most) and self.at_most[model]


@torch.no_grad()
def breakdown(models: Sequence[nn.Module], example: Example, threads: int) -> list[LayerTime]:
    """Time every innermost module, in the order they first run, and the code between them.

    Models are timed alternately, so that other load affects all of them.
    """
    rounds: list[list[_Round]] = [[] for _ in models]
    with torch_threads(threads):
        for number in range(_WARM_UP + _ROUNDS):
            for place, model in enumerate(models):
                with (
                    _time_modules(modules_by_path(model)) as times,
                    _time_modules({"": model}) as total,
                ):
                    example.call(model)
                with _time_modules({"": model}) as untimed:
                    example.call(model)
                if number >= _WARM_UP:
                    rounds[place].append(_Round(times, total[""], untimed[""]))
    widths = [
        {c.path: (c.layer.reads, c.layer.writes) for c in called_layers(model, example)}
        for model in models
    ]
    modules: dict[str, nn.Module] = {}
    for model in reversed(models):  # of layers that several models have, the first model's
        modules |= modules_by_path(model)
    layers = [
        LayerTime(
            path,
            type(modules[path]).__name__,
            tuple(by_path.get(path) for by_path in widths),
            tuple(statistics.median(r.layers.get(path, 0.0) for r in runs) for runs in rounds),
            any(p.ndim > 1 for p in modules[path].parameters()),
        )
        for path in dict.fromkeys(path for runs in rounds for path in runs[0].layers)
    ]
    seconds, at_most = zip(*(_seconds_between(runs) for runs in rounds), strict=True)
    widths_between = (None,) * len(models)
    between = LayerTime(BETWEEN_LAYERS, "functional code", widths_between, seconds, False, at_most)
    return [*layers, between]


@dataclass(frozen=True)
class _Round:
    """Seconds of a run with all layers timed, and of one without."""

    layers: dict[str, float]
    total: float
    untimed_total: float
    """Of a run in which no layer is timed, which takes time itself."""


def _seconds_between(rounds: Sequence[_Round]) -> tuple[float, bool]:
    """Return the seconds in which no layer runs, and whether they are only an upper bound.

    The difference within a run includes the overhead of timing. The difference between two runs
    includes anything that slowed one of them. The smaller one is more accurate, unless the layers
    of one run took longer than the whole other run: then the first is an upper bound.
    """
    within = statistics.median(r.total - sum(r.layers.values()) for r in rounds)
    across = statistics.median(r.untimed_total - sum(r.layers.values()) for r in rounds)
    return (min(within, across), False) if across > 0 else (within, True)


@contextmanager
def _time_modules(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, float]]:
    """Time modules in which no other of them runs: seconds by path, summed over calls.

    A module may have children it does not call, as attention does: then the time is its own.
    """
    times: dict[str, float] = {}
    latest, start = "", 0.0
    waits = any(p.is_cuda for p in modules[""].parameters())

    def now() -> float:
        if waits:
            torch.cuda.synchronize()
        return time.perf_counter()

    def before(path: str) -> Any:
        def hook(*_: Any) -> None:
            nonlocal latest, start
            latest, start = path, now()

        return hook

    def after(path: str) -> Any:
        def hook(*_: Any) -> None:
            if latest == path:
                times[path] = times.get(path, 0.0) + now() - start

        return hook

    with temporary_hooks() as handles:
        for path, module in modules.items():
            handles.append(module.register_forward_pre_hook(before(path), prepend=True))
            handles.append(module.register_forward_hook(after(path)))
        yield times
