"""Times calls, interleaved, so that other load affects all of them equally."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]

_MIN_SECONDS = 1e-3
"""Seconds a sample must take at least; shorter calls are repeated within it."""
_WARM_UP = 3
"""Calls before the first sample: caches fill, runtimes choose their kernels."""
_MIN_ROUNDS = 5
"""Minimum number of rounds, even if calls take longer than the available time."""


NOISE = 0.1
"""With a larger spread, times say more about the machine than about the model."""


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
        """Middle half of the samples, as a fraction of the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median


def time_interleaved(
    calls: Sequence[Call],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time calls in turns for about `seconds`; every round begins with another one.

    >>> ticks = iter(range(1000))
    >>> [t.median for t in time_interleaved([lambda: None], 10.0, lambda: float(next(ticks)))]
    [1.0]
    """
    repeats = [_choose_repeats(call, clock) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    start = clock()
    rounds = 0
    while rounds < _MIN_ROUNDS or clock() - start < seconds:
        for place in range(len(calls)):
            number = (place + rounds) % len(calls)
            samples[number].append(_sample(calls[number], repeats[number], clock))
        rounds += 1
    return [Timing(tuple(times)) for times in samples]


def time_ratio(first: Timing, second: Timing) -> float:
    """Return how many times as long the first takes: the median of ratios over rounds."""
    return statistics.median(a / b for a, b in zip(first.samples, second.samples, strict=True))


def describe_speedup(faster: float, spread: float = 0.0) -> str:
    """Describe a speedup; one within the spread of the times is none.

    >>> describe_speedup(1.52, 0.02), describe_speedup(0.5, 0.02), describe_speedup(1.06, 0.08)
    ('1.5× faster', '2.0× slower', 'as fast')
    """
    times = max(faster, 1 / faster)
    if f"{times:.1f}" == "1.0" or abs(1 - 1 / faster) <= min(spread, NOISE):
        return "as fast"
    return f"{times:.1f}× {'faster' if faster > 1 else 'slower'}"


def _choose_repeats(call: Call, clock: Callable[[], float]) -> int:
    """Warm up, and find how often a call must be repeated to fill a sample."""
    for _ in range(_WARM_UP):
        took = _sample(call, 1, clock)
    return max(1, math.ceil(_MIN_SECONDS / max(took, 1e-9)))


def _sample(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats
