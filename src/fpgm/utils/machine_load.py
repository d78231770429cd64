"""Detect whether other processes disturbed a measurement.

Times can look steady even if threads compete with another process for a core: the spread does not
show it, but the system's CPU time does.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

TOLERATED_CORES = 0.25
"""Cores that other processes may use without a warning: a system is never fully idle."""
MIN_SECONDS = 0.05
"""Seconds below which the system's count is too coarse."""


class MachineLoad:
    """CPU time of other processes since this object was made."""

    def __init__(self) -> None:
        self._start = _busy_seconds()

    def used_cores(self) -> float:
        """Return the cores that others used, on average; 0 if unknown."""
        start, now = self._start, _busy_seconds()
        if start is None or now is None or now[0] - start[0] < MIN_SECONDS:
            return 0.0
        return max(0.0, (now[1] - start[1]) / (now[0] - start[0]))

    def describe_contention(self, threads: int) -> str | None:
        """Describe the load if `threads` threads did not have a core each; else None."""
        others, cores = self.used_cores(), os.cpu_count() or 1
        if others <= TOLERATED_CORES or others + threads <= cores + TOLERATED_CORES:
            return None
        return f"other processes used {others:.1f} of {cores} cores"


def _busy_seconds() -> tuple[float, float] | None:
    """Return the time, and the CPU seconds of other processes since the system started."""
    with suppress(OSError, ValueError, AttributeError):
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _wait, *rest = (int(field) for field in fields)
        busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy - sum(os.times()[:4])
    return None
