"""`bench`: how fast models are, one against the other, in every runtime there is.

Models take turns in one run, so that a busy machine slows all of them; every figure is a median
with its spread, and what the smaller model should save by its MACs stands beside what it does save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fpgm.errors import FpgmError, RequestError
from fpgm.examples import Example, as_examples, batch_of, beside, resized
from fpgm.latency.aim import Where
from fpgm.latency.backends import BACKENDS, Backend, Loaded
from fpgm.latency.breakdown import Spent, breakdown
from fpgm.latency.memory import peak_of
from fpgm.latency.timing import ratio, side_by_side
from fpgm.latency.verdict import verdict
from fpgm.progress import Progress

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
    peak_bytes: int | None
    """Memory a run takes besides the weights, if the system tells."""
    file_bytes: int
    """Of what is handed to the runtime."""


@dataclass(frozen=True)
class Row:
    """All models in one runtime, with one batch size and number of threads."""

    backend: str
    batch: int
    threads: int
    figures: tuple[Figures, ...]
    theory: float
    """How many times fewer MACs the last model takes."""
    verdict: str
    """In words, for the last model against the first."""


@dataclass(frozen=True)
class Bench:
    """What was measured; `layers` is of PyTorch itself, with the first batch size."""

    rows: tuple[Row, ...]
    layers: tuple[Spent, ...]
    skipped: Mapping[str, str]
    """Runtimes that could not be used, and why."""
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


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
    >>> row.backend, round(row.theory, 1), len(row.figures)
    ('eager', 2.0, 2)
    """
    named = _named(models)
    first = next(iter(named.values()))
    example = as_examples(beside(first, example_inputs))[0]
    wanted = tuple(BACKENDS) if backends is None else tuple(backends)
    counts = [torch.get_num_threads()] if threads is None else list(threads)
    for name in wanted:
        if name not in BACKENDS:
            raise RequestError(f"backends has {name!r}: give some of {', '.join(BACKENDS)}.")
    for count in counts:
        Where.of("eager", count)
    sized = [resized(example, batch) for batch in batches] if batches else [example]
    skipped = {name: why for name in wanted if (why := BACKENDS[name].missing()) is not None}
    usable = [BACKENDS[name] for name in wanted if name not in skipped]
    if not usable:
        told = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise RequestError(f"None of these runtimes can be used here: {told}.")
    rows: list[Row] = []
    with evaluated(list(named.values())):
        layers = breakdown(list(named.values()), sized[0], counts[0])
        total = len(usable) * len(sized) * len(counts)
        for backend in usable:
            for number in counts:
                for own in sized:
                    if progress is not None:
                        progress(backend.name, len(rows), total)
                    try:
                        rows.append(_row(named, own, backend, number, seconds, layers))
                    except FpgmError as error:
                        skipped[backend.name] = str(error)
    if not rows:
        raise RequestError(f"No runtime ran these models: {'; '.join(skipped.values())}")
    versions = {backend.name: backend.version() for backend in usable}
    return Bench(tuple(rows), tuple(layers), skipped, versions)


def _named(models: Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    if isinstance(models, nn.Module):
        raise RequestError("models is one module: give a list of models, the original first.")
    if isinstance(models, Mapping):
        named = dict(models)
    else:
        rest = len(models) - 1
        names = ["original", *(f"small {i + 1}" if rest > 1 else "small" for i in range(rest))]
        named = dict(zip(names, models, strict=True))
    if not named or not all(isinstance(model, nn.Module) for model in named.values()):
        raise RequestError("models has something else than modules: give torch.nn.Modules.")
    return named


def _row(
    named: Mapping[str, nn.Module],
    example: Example,
    backend: Backend,
    threads: int,
    seconds: float,
    layers: Sequence[Spent],
) -> Row:
    loaded: list[Loaded] = []
    peaks: list[int | None] = []
    for model in named.values():
        found = backend.load(model, example, threads)
        _, peak = peak_of(found.run, cuda=backend.name.startswith("cuda"))
        loaded.append(found)
        peaks.append(peak)
    timings = side_by_side([own.run for own in loaded], seconds)
    batch = batch_of(example) or 1
    figures = tuple(
        Figures(
            name,
            timing.median,
            timing.spread,
            batch / timing.median,
            ratio(timings[0], timing),
            peak,
            own.size or _weight_bytes(model),
        )
        for (name, model), timing, peak, own in zip(
            named.items(), timings, peaks, loaded, strict=True
        )
    )
    macs = [_macs(model, example) for model in named.values()]
    theory = macs[0] / max(macs[-1], 1)
    return Row(
        backend.name, batch, threads, figures, theory,
        verdict(figures[-1].faster, theory, max(f.spread for f in figures), layers),
    )  # fmt: skip


@contextmanager
def evaluated(models: Sequence[nn.Module]) -> Iterator[None]:
    """All in eval mode, and afterwards as they were."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _macs(model: nn.Module, example: Example) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        example.call(model)
    return int(counter.get_total_flops()) // 2


def _weight_bytes(model: nn.Module) -> int:
    """Size of a file of its tensors."""
    return sum(t.nbytes for t in {id(t): t for t in model.state_dict().values()}.values())
