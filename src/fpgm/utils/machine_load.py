"""Whether something else on the machine took part in a measurement.

Times of two threads that fight another process for a core look steady and mean nothing: their
spread does not give it away, but the system's own count of work done does.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

LITTLE = 0.25
"""Cores that others may take without a word: a system is never quite still."""
SHORTEST = 0.05
"""Seconds below which the system's clock is too coarse to tell."""


class Neighbours:
    """What other processes have been doing since this was made."""

    def __init__(self) -> None:
        self._start = _worked()

    def cores(self) -> float:
        """Cores that others took, on average; 0 where the system does not tell."""
        start, now = self._start, _worked()
        if start is None or now is None or now[0] - start[0] < SHORTEST:
            return 0.0
        return max(0.0, (now[1] - start[1]) / (now[0] - start[0]))

    def crowd(self, threads: int) -> str | None:
        """In words, if so many threads had no core each to themselves."""
        others, cores = self.cores(), os.cpu_count() or 1
        if others <= LITTLE or others + threads <= cores + LITTLE:
            return None
        return f"other work took {others:.1f} of {cores} cores"


def _worked() -> tuple[float, float] | None:
    """Seconds now, and seconds that cores have worked for others since the system started."""
    with suppress(OSError, ValueError, AttributeError):
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _wait, *rest = (int(field) for field in fields)
        busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy - sum(os.times()[:4])
    return None
