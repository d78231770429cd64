"""A lock for state that all threads share: hooks, random numbers, warnings.

Tracing a model puts hooks on it, switches its mode and torch's fast paths, and reseeds random
numbers. All of this is restored afterwards, which is only correct for one thread at a time. A hook
is also called in any other thread that runs the model, so hooks are added and removed under the
lock.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

GLOBAL_LOCK = threading.RLock()
"""Held while shared state is changed; reentrant."""


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress warnings, one thread at a time."""
    with GLOBAL_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the search for unused cycles, which looks through every object of the process.

    Tracing and planning make many small objects, nearly all of which are freed without it.
    """
    with GLOBAL_LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


P = ParamSpec("P")
R = TypeVar("R")


def with_global_lock(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that only one thread at a time runs it."""

    @wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with GLOBAL_LOCK:
            return call(*args, **kwargs)

    return wrapper
