"""Keyword options of public functions: a misspelled one raises an error with a suggestion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fpgm.errors import UnknownOptionError
from fpgm.utils.text import suggest_name

P = ParamSpec("P")
R = TypeVar("R")


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that a function does not have.

    >>> check_keywords("plan", ["ratee"], ["rate", "macs"])
    Traceback (most recent call last):
        ...
    fpgm.errors.UnknownOptionError: plan() has no option 'ratee' (did you mean 'rate'?).
    """
    known = list(known)
    for name in given:
        if name not in known:
            hint = suggest_name(name, known) or f": see help(fpgm.{function})"
            raise UnknownOptionError(f"{function}() has no option {name!r}{hint}.")


def reject_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it rejects a misspelled keyword with a hint."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return wrapper


def with_options_of(
    source: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that passes its keywords on, so that it has the other's signature.

    Type checkers, editors and `inspect.signature` see every option with its type and default.
    """

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        signature = inspect.signature(source)
        returns = inspect.signature(function).return_annotation

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            check_keywords(function.__name__, kwargs, signature.parameters)
            return function(*args, **kwargs)

        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            return_annotation=returns
        )
        return wrapper

    return decorate
