"""One thread at a time where a whole process shares something: hooks, random numbers, warnings.

Watching a model puts hooks on it, switches its mode and torch's fast paths, and starts random
numbers anew; all of that is put back, which only one thread can do without spoiling another's. A
hook is also called in whatever other thread runs the model, so it comes and goes within a turn.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

TURN = threading.RLock()
"""Held by whoever changes what threads share; the same thread may take it again."""


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings; those who ask for it together take turns."""
    with TURN, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


P = ParamSpec("P")
R = TypeVar("R")


def in_turn(call: Callable[P, R]) -> Callable[P, R]:
    """A function that threads run one after the other."""

    @wraps(call)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
        with TURN:
            return call(*args, **kwargs)

    return waiting
