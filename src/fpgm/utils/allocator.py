"""Reuse freed memory instead of returning it to the operating system after every operator.

The C library on Linux (glibc) maps blocks above 32 MB when they are allocated and unmaps them when
they are freed. Activations of a batch are often larger, and the kernel clears every page again: a
third of the time of a training on the CPU. Elsewhere, and where the user has set options of glibc's
allocator, these functions do nothing.

glibc cannot be asked for its settings. After a block, they are what they would be in a process that
has freed a block of 32 MB before.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -3, -4, -8
"""Names of options in glibc's malloc.h."""
KEEP_ALL = -1
"""As a trim threshold: free memory at the end of the heap stays with the process."""
DEFAULT_MMAP_MAX = 65_536
LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Which glibc reaches by itself once a block of this size has been freed."""

_lock = threading.Lock()
_users = 0


@contextmanager
def reuse_freed_memory() -> Iterator[None]:
    """Keep freed memory for the next allocation inside this block; return it at the end."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _set_options({MMAP_MAX: 0, TRIM_THRESHOLD: KEEP_ALL})
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _set_options(
                    {
                        MMAP_MAX: DEFAULT_MMAP_MAX,
                        MMAP_THRESHOLD: LARGEST_MMAP_THRESHOLD,
                        TRIM_THRESHOLD: 2 * LARGEST_MMAP_THRESHOLD,
                    }
                )
                _return_free_memory()


def share_memory_among_threads() -> None:
    """Let all threads allocate from one heap, for processes of our own.

    Memory of another thread's heap is reused only for blocks below 64 MB. This cannot be undone.
    """
    _set_options({ARENA_MAX: 1})


def _set_options(values: dict[int, int]) -> None:
    library = _glibc()
    if library is not None:
        for name, value in values.items():
            library.mallopt(name, value)


def _return_free_memory() -> None:
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    """Return the C library if it is glibc, and if the user has not set its options."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    try:
        library = ctypes.CDLL(None)
        version: Callable[[], Any] = library.gnu_get_libc_version
    except (AttributeError, OSError, TypeError):
        return None
    return library if callable(version) else None
