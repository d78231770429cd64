"""The steps of a longer job, with their durations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Steps(Protocol):
    """The interface for following a job; the command line shows a progress bar."""

    seconds: dict[str, float]
    """Duration of every finished step."""

    def step(self, name: str) -> AbstractContextManager[None]:
        """Run a step in a context."""

    def report_layer(self, layer: str, done: int, total: int) -> None:
        """Report the layer that the current step works on."""


class StepTimer:
    """Measures how long steps take and shows nothing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)

    def report_layer(self, layer: str, done: int, total: int) -> None:
        """Ignore the layer."""
