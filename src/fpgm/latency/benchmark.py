"""`bench`: how fast models are, one against the other, in every runtime there is.

Models take turns in one run, so that a busy machine slows all of them; every figure is a median
with its spread, and what the smaller model should save by its MACs stands beside what it does save.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fpgm.errors import ForwardError, ModelError, RequestError
from fpgm.latency.backends import BACKENDS, Backend
from fpgm.latency.budget_search import Where
from fpgm.latency.layer_breakdown import Spent, breakdown
from fpgm.latency.memory import weight_bytes
from fpgm.latency.speedup_summary import contradiction, reasons, verdict
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example, as_examples, batch_of, beside, resized
from fpgm.utils.machine_load import Neighbours
from fpgm.utils.progress import Progress
from fpgm.utils.text import figure, reason
from fpgm.utils.timing import ratio, side_by_side

SECONDS = 2.0
"""Time given to each comparison."""


@dataclass(frozen=True)
class Figures:
    """One model in one runtime."""

    model: str
    seconds: float
    spread: float
    """Middle half of the samples, as a share of their median."""
    per_second: float
    """Inputs, of whole batches."""
    faster: float
    """How many times as fast as the first model, in the median of turns."""
    file_bytes: int
    """Of what is handed to the runtime."""
    memory_bytes: int | None
    """Needed to run, weights included: in PyTorch by its allocations, elsewhere by how much a
    process grows; None where that cannot be told."""
    theory: float | None = None
    """How many times fewer MACs it takes than the first model; None of the first itself."""
    verdict: str | None = None
    """In words, against the first model; None of the first itself."""


@dataclass(frozen=True)
class Row:
    """All models in one runtime, with one batch size and number of threads."""

    backend: str
    batch: int
    threads: int
    figures: tuple[Figures, ...]
    crowd: str | None = None
    """Why its times are not to be relied on, if they are not: what others did meanwhile."""

    @property
    def where(self) -> str:
        """In words: `eager, batch 1, threads 2`."""
        return _where(self.backend, self.batch, self.threads)


@dataclass(frozen=True)
class Bench:
    """What was measured; `layers` is of PyTorch itself, with the first batch size."""

    rows: tuple[Row, ...]
    layers: tuple[Spent, ...]
    skipped: Mapping[str, str]
    """What could not be measured, and why: whole runtimes, or one size in one of them."""
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """A line for every model in every runtime."""
        return "\n".join(
            f"{row.where}: {own.model} {figure(1000 * own.seconds)} ms{_said(own.verdict)}"
            for row in self.rows
            for own in row.figures
        )


def bench(
    models: Mapping[str, nn.Module] | Sequence[nn.Module],
    example_inputs: Any,
    *,
    backends: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Bench:
    """Time models against the first of them, in turns, in every runtime.

    `backends` names runtimes (all that can be used here, by default); `batches` are batch sizes
    (the example's own, by default), `threads` numbers of threads (torch's own). Models are timed
    in eval mode and stay as they are.

    >>> import fpgm
    >>> net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3))
    >>> x = torch.zeros(1, 3, 32, 32)
    >>> small = fpgm.prune(net, x, rate=0.5)
    >>> row = bench([net, small], x, backends=["eager"], seconds=0.1).rows[0]
    >>> row.where, [own.theory and round(own.theory, 1) for own in row.figures]
    ('eager, batch 1, threads ...', [None, 2.0])
    """
    wanted = list(BACKENDS) if backends is None else _several("backends", backends)
    counts = [torch.get_num_threads()] if threads is None else _several("threads", threads)
    sizes = None if batches is None else _several("batches", batches)
    named = {name: copy_model(model).eval() for name, model in _named(models).items()}
    example = as_examples(beside(next(iter(named.values())), example_inputs))[0]
    for name in wanted:
        if name not in BACKENDS:
            raise RequestError(f"backends has {name!r}: give some of {', '.join(BACKENDS)}.")
    for count in counts:
        Where.of("eager", count)
    sized = [example] if sizes is None else [resized(example, batch) for batch in sizes]
    skipped = {name: why for name in wanted if (why := BACKENDS[name].missing()) is not None}
    usable = [BACKENDS[name] for name in wanted if name not in skipped]
    if not usable:
        raise RequestError(f"None of these runtimes can be used here: {_told(skipped)}.")
    rows: list[Row] = []
    macs = [[_macs(name, model, own) for name, model in named.items()] for own in sized]
    layers = breakdown(list(named.values()), sized[0], counts[0])
    jobs = list(itertools.product(usable, counts, zip(sized, macs, strict=True)))
    for number, (backend, count, (own, work)) in enumerate(jobs):
        if progress is not None:
            progress(backend.name, number, len(jobs))
        try:
            rows.append(_row(named, own, work, backend, count, seconds, layers))
        except Exception as error:  # runtimes have errors of their own kinds
            skipped[_where(backend.name, batch_of(own) or 1, count)] = reason(error)
    if not rows:
        raise ModelError(f"No runtime ran these models: {_told(skipped)}.")
    versions = {backend.name: backend.version() for backend in usable}
    return Bench(tuple(rows), tuple(layers), skipped, versions)


def _named(models: Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    if isinstance(models, nn.Module):
        raise RequestError("models is one module: give a list of models, the original first.")
    if isinstance(models, Mapping):
        named = dict(models)
    else:
        rest = max(0, len(models) - 1)
        names = ["original", *(f"small {i + 1}" if rest > 1 else "small" for i in range(rest))]
        named = dict(zip(names, models, strict=False))
    if not named or not all(isinstance(model, nn.Module) for model in named.values()):
        raise RequestError("models is empty or has other things: give torch.nn.Modules.")
    return named


T = TypeVar("T")


def _several(name: str, values: Sequence[T]) -> list[T]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError(f"{name} is {values!r}: give a list.")
    if not values:
        raise RequestError(f"{name} is empty: give at least one, or leave it out.")
    return list(values)


def _said(verdict: str | None) -> str:
    return f" ({verdict})" if verdict else ""


def _where(backend: str, batch: int, threads: int) -> str:
    return f"{backend}, batch {batch}, threads {threads}"


def _told(skipped: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in skipped.items())


def _row(
    named: Mapping[str, nn.Module],
    example: Example,
    macs: Sequence[int],
    backend: Backend,
    threads: int,
    seconds: float,
    layers: Sequence[Spent],
) -> Row:
    loaded = [backend.load(model, example, threads) for model in named.values()]
    neighbours = Neighbours()
    timings = side_by_side([own.run for own in loaded], seconds)
    crowd = neighbours.crowd(threads)
    batch = batch_of(example) or 1
    figures: list[Figures] = []
    first = timings[0]
    found = (contradiction(ratio(first, own), first.median / own.median) for own in timings[1:])
    doubt = crowd or next(filter(None, found), None)
    for place, (name, model) in enumerate(named.items()):
        own, timing = loaded[place], timings[place]
        faster = ratio(first, timing)
        theory = said = None
        if place > 0:
            theory = macs[0] / macs[place] if macs[0] and macs[place] else 1.0
            spread = max(first.spread, timing.spread)
            said = verdict(faster, theory, spread, reasons(layers, place, own.pieces), doubt)
        figures.append(
            Figures(
                name,
                timing.median,
                timing.spread,
                batch / timing.median,
                faster,
                own.size or weight_bytes(model),
                own.memory(),
                theory,
                said,
            )
        )
    return Row(backend.name, batch, threads, tuple(figures), doubt)


@torch.no_grad()
def _macs(name: str, model: nn.Module, example: Example) -> int:
    """Multiply-accumulates of one run, the first in which anything can go wrong."""
    try:
        with FlopCounterMode(display=False) as counter:
            example.call(model)
    except Exception as error:
        raise ForwardError(f"Model '{name}' fails on the example: {reason(error)}.") from error
    return int(counter.get_total_flops()) // 2
