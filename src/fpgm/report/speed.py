"""The measured times of a run, as rows of a table, and the best reliable one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fpgm.report.records import BenchRowRecord, Number
from fpgm.report.run import Run
from fpgm.utils.text import format_number
from fpgm.utils.timing import describe_speedup

_RUNTIMES = {
    "eager": "PyTorch",
    "channels-last": "PyTorch (channels last)",
    "compile": "torch.compile",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "cuda": "PyTorch on CUDA",
    "cuda-compile": "torch.compile on CUDA",
}


@dataclass(frozen=True)
class Speed:
    """The time of the original and of the last model in one runtime."""

    runtime: str
    """Its name, as its own documentation writes it."""
    batch: int
    threads: int
    original: str
    """Name of the model that the other is compared with."""
    milliseconds: tuple[str, str]
    """Before and after: the original's median, and that divided by the speedup."""
    faster: float
    """Speedup by paired runs."""
    theory: Number
    """MACs of the original divided by those of the last model."""
    spread: float = 0.0
    """Of the times, relative to their median."""
    doubt: str = ""
    """Why the time is unreliable, if it is."""

    @property
    def change(self) -> str:
        """Format the speedup; a doubtful one is not given."""
        return "–" if self.doubt else describe_speedup(self.faster, self.spread)

    @property
    def setting(self) -> str:
        """Describe runtime, batch size and threads."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.runtime}, batch {self.batch}, {threads}"


def runtime_name(backend: str) -> str:
    """Return a runtime's full name.

    >>> runtime_name("onnxruntime"), runtime_name("other")
    ('ONNX Runtime', 'other')
    """
    return _RUNTIMES.get(backend, backend)


def speeds(run: Run) -> list[Speed]:
    """List the measurements that compare two models."""
    rows = run.bench.rows if run.bench else ()
    return [speed for row in rows if (speed := _speed(row)) is not None]


def best_speed(measured: Sequence[Speed]) -> Speed | None:
    """Return the reliable measurement with the largest speedup, or None."""
    reliable = [speed for speed in measured if not speed.doubt]
    return max(reliable, key=lambda speed: speed.faster, default=None)


def _speed(row: BenchRowRecord) -> Speed | None:
    if len(row.figures) < 2:
        return None
    first, last = row.figures[0], row.figures[-1]
    if last.faster is None or last.faster <= 0:
        return None
    return Speed(
        runtime_name(row.backend),
        row.batch,
        row.threads,
        first.model,
        (_milliseconds(first.seconds), _milliseconds(first.seconds, last.faster)),
        last.faster,
        row.theoretical_speedup,
        max(first.spread or 0.0, last.spread or 0.0),
        row.crowd or "",
    )


def _milliseconds(seconds: Number, faster: float = 1.0) -> str:
    return "–" if seconds is None else format_number(1000 * seconds / faster)
