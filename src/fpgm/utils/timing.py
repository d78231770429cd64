"""How long calls take, measured side by side: what one pays for a busy machine all of them pay."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]

_SHORTEST = 1e-3
"""Seconds a sample must take at least; shorter calls are repeated within it."""
_WARM_UP = 3
"""Calls before the first sample: caches fill, runtimes choose their kernels."""
_FEWEST = 5
"""Rounds even of calls that take longer than all the time there is."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, sampled again and again."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Half of the samples took no longer."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Middle half of the samples, as a share of the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median


def side_by_side(
    calls: Sequence[Call],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Sample all calls in turns for about so many seconds; every round begins with another one.

    >>> ticks = iter(range(1000))
    >>> [t.median for t in side_by_side([lambda: None], 10.0, lambda: float(next(ticks)))]
    [1.0]
    """
    repeats = [_repeats(call, clock) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    start = clock()
    rounds = 0
    while rounds < _FEWEST or clock() - start < seconds:
        for place in range(len(calls)):
            number = (place + rounds) % len(calls)
            samples[number].append(_sample(calls[number], repeats[number], clock))
        rounds += 1
    return [Timing(tuple(own)) for own in samples]


def ratio(first: Timing, second: Timing) -> float:
    """How many times as long the first takes: the median over rounds, each against its own."""
    return statistics.median(a / b for a, b in zip(first.samples, second.samples, strict=True))


def _repeats(call: Call, clock: Callable[[], float]) -> int:
    """Warm up, and find how often a call must be repeated to fill a sample."""
    for _ in range(_WARM_UP):
        took = _sample(call, 1, clock)
    return max(1, math.ceil(_SHORTEST / max(took, 1e-9)))


def _sample(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats
