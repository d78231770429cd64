"""`bench`: time models against each other in all available runtimes.

Models are timed alternately, so that other load on the machine affects all of them. Every time is a
median with its spread, and the theoretical speedup is given next to the measured one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fpgm.errors import ForwardError, ModelError, RequestError
from fpgm.latency.backends import BACKENDS, Backend
from fpgm.latency.budget_search import BackendConfig
from fpgm.latency.layer_breakdown import LayerTime, breakdown
from fpgm.latency.memory import weight_bytes
from fpgm.latency.speedup_summary import find_contradiction, slowdown_reasons, summarize
from fpgm.utils.copying import copy_model
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.example_inputs import (
    Example,
    as_examples,
    batch_size,
    resize_batch,
    to_model_device,
)
from fpgm.utils.html_table import html_table
from fpgm.utils.machine_load import MachineLoad
from fpgm.utils.progress import Progress
from fpgm.utils.text import escape_text, format_number, reason, shorten
from fpgm.utils.timing import time_interleaved, time_ratio

SECONDS = 2.0
"""Time to spend on each comparison."""


@dataclass(frozen=True)
class ModelTiming:
    """Measurements of one model in one runtime."""

    model: str
    seconds: float
    """The first model's median; of another, that median divided by `faster`."""
    spread: float
    """Interquartile range of the samples, relative to their median."""
    per_second: float
    """Inputs per second."""
    faster: float
    """Speedup over the first model: the median of paired runs."""
    file_bytes: int
    """Size of the model in the runtime's format."""
    memory_bytes: int | None
    """Needed to run, weights included: in PyTorch its allocations, elsewhere the growth of a
    process; None if unknown."""
    theory: float | None = None
    """Theoretical speedup over the first model, by MACs; None for the first."""
    verdict: str | None = None
    """The speedup as a sentence; None for the first model."""


@dataclass(frozen=True)
class BenchRow:
    """All models in one runtime, with one batch size and number of threads."""

    backend: str
    batch: int
    threads: int
    figures: tuple[ModelTiming, ...]
    crowd: str | None = None
    """Why the times are unreliable, if they are, such as load by other processes."""

    @property
    def where(self) -> str:
        """Describe the setting: `eager, batch 1, threads 2`."""
        return _setting(self.backend, self.batch, self.threads)

    @property
    def outcome(self) -> str:
        """Describe the result: `small 2.10× as fast as original (eager, batch 1, threads 2)`."""
        first, *others = self.figures
        names = ", ".join(f"{escape_text(own.model)} {own.faster:.2f}×" for own in others)
        if self.crowd:
            return f"no reliable time: {self.crowd} ({self.where})"
        said = (
            f"{names} as fast as {escape_text(first.model)}"
            if others
            else (f"{escape_text(first.model)} {format_number(1000 * first.seconds)} ms")
        )
        return f"{said} ({self.where})"


@dataclass(frozen=True, repr=False)
class Bench:
    """All measurements; `layers` are timed in PyTorch, with the first batch size."""

    rows: tuple[BenchRow, ...]
    layers: tuple[LayerTime, ...]
    skipped: Mapping[str, str]
    """What could not be measured, and why: runtimes, or single settings of them."""
    versions: Mapping[str, str]
    layers_crowd: str | None = None
    """Why the times of layers are unreliable, if they are."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Write a line for every model in every runtime."""
        return "\n".join(
            f"{row.where}: {timing.model} {format_number(1000 * timing.seconds)} ms"
            f"{_in_parentheses(timing.verdict)}"
            for row in self.rows
            for timing in row.figures
        )

    def __repr__(self) -> str:
        return f"Bench({shorten([row.outcome for row in self.rows])})"

    def _repr_html_(self) -> str:
        rows = [
            (row.backend, str(row.batch), str(row.threads), own.model,
             f"{format_number(1000 * own.seconds)} ms", own.verdict or "")
            for row in self.rows
            for own in row.figures
        ]  # fmt: skip
        header = ("runtime", "batch", "threads", "model", "time", "against the first")
        skipped = [f"not measured: {name} ({why})" for name, why in self.skipped.items()]
        return html_table("Bench", header, rows, skipped)


@cpu_by_default()
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
    """Time models alternately in every runtime, and compare them with the first.

    Models are timed in eval mode and not changed.

    Args:
        models: by name, or a list with the original first.
        example_inputs: as for `plan`.
        backends: runtimes; by default all that can be used on this machine.
        batches: batch sizes; by default that of the example.
        threads: numbers of threads; by default as many as torch uses.
        seconds: time to spend on each comparison.
        progress: called with a title, the number of comparisons done, and their total.

    >>> import fpgm
    >>> net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3))
    >>> x = torch.zeros(1, 3, 32, 32)
    >>> small = fpgm.prune(net, x, rate=0.5)
    >>> row = bench([net, small], x, backends=["eager"], seconds=0.1).rows[0]
    >>> row.where, [timing.theory and round(timing.theory, 1) for timing in row.figures]
    ('eager, batch 1, threads ...', [None, 2.0])
    """
    requested = list(BACKENDS) if backends is None else _check_list("backends", backends)
    counts = [torch.get_num_threads()] if threads is None else _check_list("threads", threads)
    sizes = None if batches is None else _check_list("batches", batches)
    named = {name: copy_model(model).eval() for name, model in _name_models(models).items()}
    example = as_examples(to_model_device(next(iter(named.values())), example_inputs))[0]
    for name in requested:
        if name not in BACKENDS:
            raise RequestError(f"backends has {name!r}: give some of {', '.join(BACKENDS)}.")
    if not 0 <= seconds < math.inf:
        raise RequestError(f"seconds is {seconds!r}: give a number of at least 0.")
    for count in counts:
        BackendConfig.of("eager", count)
    sized = [example] if sizes is None else [resize_batch(example, batch) for batch in sizes]
    skipped: dict[str, str] = {}
    for name in requested:
        if (why := BACKENDS[name].unavailable_reason()) is not None:
            skipped[name] = why
    usable = [BACKENDS[name] for name in requested if name not in skipped]
    if not usable:
        raise RequestError(
            f"None of these runtimes can be used on this machine: {_format_skipped(skipped)}."
        )
    rows: list[BenchRow] = []
    macs = [[_count_macs(name, model, x) for name, model in named.items()] for x in sized]
    load = MachineLoad()
    layers = breakdown(list(named.values()), sized[0], counts[0])
    layers_crowd = load.describe_contention(counts[0])
    jobs = list(itertools.product(usable, counts, zip(sized, macs, strict=True)))
    for number, (backend, count, (batch, batch_macs)) in enumerate(jobs):
        if progress is not None:
            progress(backend.name, number, len(jobs))
        try:
            rows.append(_measure(named, batch, batch_macs, backend, count, seconds, layers))
        except Exception as error:  # each runtime has its own kinds of errors
            skipped[_setting(backend.name, batch_size(batch) or 1, count)] = reason(error)
    if not rows:
        raise ModelError(f"No runtime could run these models: {_format_skipped(skipped)}.")
    versions = {backend.name: backend.version() for backend in usable}
    # Layers may be timed too briefly to notice what disturbed the whole models.
    layers_crowd = layers_crowd or next((row.crowd for row in rows if row.crowd), None)
    return Bench(tuple(rows), tuple(layers), skipped, versions, layers_crowd)


def _name_models(models: Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Check the models; name those of a list `original` and `small`, the latter with numbers."""
    if isinstance(models, nn.Module):
        raise RequestError("models is a single module: give a list of models, the original first.")
    if isinstance(models, Mapping):
        named = dict(models)
    else:
        rest = max(0, len(models) - 1)
        names = ["original", *(f"small {i + 1}" if rest > 1 else "small" for i in range(rest))]
        named = dict(zip(names, models, strict=False))
    if not named or not all(isinstance(model, nn.Module) for model in named.values()):
        raise RequestError(
            "models is empty, or has something other than modules: give torch.nn.Modules."
        )
    return named


T = TypeVar("T")


def _check_list(name: str, values: Sequence[T]) -> list[T]:
    """Refuse an option that is not a list with at least one value."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError(f"{name} is {values!r}: give a list.")
    if not values:
        raise RequestError(f"{name} is empty: give at least one, or leave it out.")
    return list(values)


def _in_parentheses(verdict: str | None) -> str:
    return f" ({verdict})" if verdict else ""


def _setting(backend: str, batch: int, threads: int) -> str:
    return f"{backend}, batch {batch}, threads {threads}"


def _format_skipped(skipped: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({why})" for name, why in skipped.items())


def _measure(
    named: Mapping[str, nn.Module],
    example: Example,
    macs: Sequence[int],
    backend: Backend,
    threads: int,
    seconds: float,
    layers: Sequence[LayerTime],
) -> BenchRow:
    """Time all models in one setting.

    Args:
        named: The models by name; the first is the baseline.
        example: An input of the batch size to time.
        macs: MACs of each model, in the same order.
        backend: The runtime.
        threads: Number of threads.
        seconds: Time to spend.
        layers: Layer times in PyTorch, which explain a small speedup.
    """
    loaded = [backend.load(model, example, threads) for model in named.values()]
    load = MachineLoad()
    timings = time_interleaved([runnable.run for runnable in loaded], seconds)
    other_load = load.describe_contention(threads)
    batch = batch_size(example) or 1
    results: list[ModelTiming] = []
    first = timings[0]
    contradictions = (
        find_contradiction(time_ratio(first, timing), first.median / timing.median)
        for timing in timings[1:]
    )
    doubt = other_load or next(filter(None, contradictions), None)
    for place, (name, model) in enumerate(named.items()):
        runnable, timing = loaded[place], timings[place]
        faster = time_ratio(first, timing)  # 1 for the first itself
        seconds = first.median / faster
        theory = verdict = None
        if place > 0:
            theory = macs[0] / macs[place] if macs[0] and macs[place] else 1.0
            spread = max(first.spread, timing.spread)
            reasons = slowdown_reasons(layers, place, runnable.profile)
            verdict = summarize(faster, theory, spread, reasons, doubt)
        results.append(
            ModelTiming(
                name,
                seconds,
                timing.spread,
                batch / seconds,
                faster,
                runnable.size or weight_bytes(model),
                runnable.memory(),
                theory,
                verdict,
            )
        )
    return BenchRow(backend.name, batch, threads, tuple(results), doubt)


@torch.no_grad()
def _count_macs(name: str, model: nn.Module, example: Example) -> int:
    """Count the MACs of one run. This is the first run, so it also detects bad inputs."""
    try:
        with FlopCounterMode(display=False) as counter:
            example.call(model)
    except Exception as error:
        raise ForwardError(f"Model '{name}' fails on the example: {reason(error)}.") from error
    return int(counter.get_total_flops()) // 2
