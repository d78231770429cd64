"""The rank and number of processes, and whether a process group was initialized."""

from __future__ import annotations

import os

_initialized = False


def is_main_process() -> bool:
    """Return whether this process has rank 0."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def mark_initialized() -> None:
    """Record that this process has initialized a process group."""
    global _initialized
    _initialized = True


def was_initialized() -> bool:
    """Return whether it ever did, even if the group is destroyed by now."""
    return _initialized
