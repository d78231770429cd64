"""Peak memory of what happens in between, as far as the system tells."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(work: Callable[[], T], *, cuda: bool = False) -> tuple[T, int | None]:
    """What the work returns, and how many bytes more than before it held at most.

    On the processor that is resident memory, which Linux lets a process reset and read; where it
    does not, None.
    """
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        torch.cuda.synchronize()
        return result, int(torch.cuda.max_memory_allocated() - before)
    try:
        _CLEAR.write_text("5")  # forget the highest so far
        before = _resident("VmRSS")
    except (OSError, LookupError):
        return work(), None
    result = work()
    return result, max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    found: Any = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(name)
    return int(found[1]) * 1024
