"""Where a model's time goes in PyTorch: every layer on its own, models side by side.

What no layer owns (functional activations, additions, channels that adapters move) is what the
whole model takes beyond its layers.
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
from fpgm.utils.modules import modules_by_path

BETWEEN = "between layers"
"""In place of a path: time of the whole model in which no layer runs."""
_ROUNDS = 7
_WARM_UP = 2


@dataclass(frozen=True)
class Spent:
    """A layer in all models, or what is between layers: its widths and its seconds."""

    path: str
    kind: str
    widths: tuple[tuple[int, int] | None, ...]
    """Channels read and written, where it is a convolution or linear layer, by model."""
    seconds: tuple[float, ...]
    multiplies: bool = True
    """Whether it has a matrix of weights; what has none waits for memory."""
    at_most: tuple[bool, ...] = ()
    """By model, whether it may take less, because noise leaves no more than a bound."""

    def bounds(self, place: int) -> bool:
        """Whether the seconds of the model at a place are only a bound."""
        return bool(self.at_most) and self.at_most[place]


@torch.no_grad()
def breakdown(models: Sequence[nn.Module], example: Example, threads: int) -> list[Spent]:
    """Seconds of every innermost module, in the order they first run, and of all between them.

    Models take turns.
    """
    rounds: list[list[_Round]] = [[] for _ in models]
    with torch_threads(threads):
        for number in range(_WARM_UP + _ROUNDS):
            for place, model in enumerate(models):
                with _clocked(modules_by_path(model)) as times, _clocked({"": model}) as whole:
                    example.call(model)
                with _clocked({"": model}) as alone:
                    example.call(model)
                if number >= _WARM_UP:
                    rounds[place].append(_Round(times, whole[""], alone[""]))
    widths = [
        {c.path: (c.layer.reads, c.layer.writes) for c in called_layers(model, example)}
        for model in models
    ]
    modules: dict[str, nn.Module] = {}
    for model in reversed(models):  # a layer that only some have is theirs; of all, the first's
        modules |= modules_by_path(model)
    layers = [
        Spent(
            path,
            type(modules[path]).__name__,
            tuple(own.get(path) for own in widths),
            tuple(statistics.median(r.layers.get(path, 0.0) for r in own) for own in rounds),
            any(p.ndim > 1 for p in modules[path].parameters()),
        )
        for path in dict.fromkeys(path for own in rounds for path in own[0].layers)
    ]
    seconds, at_most = zip(*(_between(own) for own in rounds), strict=True)
    widths_between = (None,) * len(models)
    between = Spent(BETWEEN, "functional code", widths_between, seconds, False, at_most)
    return [*layers, between]


@dataclass(frozen=True)
class _Round:
    """A run with clocks in all layers, and one without."""

    layers: dict[str, float]
    whole: float
    alone: float
    """The whole, where no clock of a layer makes it longer."""


def _between(rounds: Sequence[_Round]) -> tuple[float, bool]:
    """Seconds of the whole in which no layer runs, and whether it may be less.

    Within a run they hold what the clocks take; between two runs, whatever held up the second one
    alone. The smaller is nearer the truth, unless the layers of one run took longer than all of the
    other: then only the first is known, and that the truth is below it.
    """
    within = statistics.median(r.whole - sum(r.layers.values()) for r in rounds)
    across = statistics.median(r.alone - sum(r.layers.values()) for r in rounds)
    return (min(within, across), False) if across > 0 else (within, True)


@contextmanager
def _clocked(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, float]]:
    """Seconds by path of those modules in which no other of them runs, added up over their calls.

    A module may hold others and not call them, as attention does: then the time is its own.
    """
    times: dict[str, float] = {}
    latest, begun = "", 0.0
    waits = any(p.is_cuda for p in modules[""].parameters())

    def now() -> float:
        if waits:
            torch.cuda.synchronize()
        return time.perf_counter()

    def before(path: str) -> Any:
        def hook(*_: Any) -> None:
            nonlocal latest, begun
            latest, begun = path, now()

        return hook

    def after(path: str) -> Any:
        def hook(*_: Any) -> None:
            if latest == path:
                times[path] = times.get(path, 0.0) + now() - begun

        return hook

    handles = []
    for path, module in modules.items():
        handles.append(module.register_forward_pre_hook(before(path), prepend=True))
        handles.append(module.register_forward_hook(after(path)))
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()
