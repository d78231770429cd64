"""Read a plan's JSON; every problem raises a one-line `PlanError`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_origin

from fpgm.errors import PlanError
from fpgm.utils.text import escape_text, shorten
from fpgm.utils.typed_json import Decoder

T = TypeVar("T")

LARGEST_INT = 2**63
"""Numbers in a plan count channels, parameters or operations: all fit into 64 bits."""
DEEPEST = 5
"""Levels of tables and lists in free-form values; planners write two."""


class PlanDecoder(Decoder):
    """Decodes a plan: checks the size of numbers, and each part with its own `problem`.

    >>> decoder = PlanDecoder()
    >>> decoder.value(tuple[int, ...], [1, 2], "keep"), decoder.value(float, 1, "share")
    ((1, 2), 1)
    >>> decoder.value(int, 2**63, "size")
    Traceback (most recent call last):
        ...
    fpgm.errors.PlanError: This is not a plan: 'size' is invalid.
    """

    error = PlanError

    def record(self, kind: type[T], item: Any, name: str = "") -> T:
        part = super().record(kind, item, name)
        problem = getattr(part, "problem", lambda: None)()
        if problem is not None:
            about = getattr(part, fields(kind)[0].name)  # type: ignore[arg-type]
            shown = escape_text(about if isinstance(about, str) else shorten(about), 200)
            raise PlanError(f"This is not a plan: '{shown}': {problem}.")
        return part

    def value(self, hint: Any, value: Any, name: str) -> Any:
        if hint == tuple[int, ...] and isinstance(value, list):  # most of a plan
            if all(type(n) is int and -LARGEST_INT < n < LARGEST_INT for n in value):
                return tuple(value)
            raise self.wrong_type(hint, value, name)
        if hint in (int, float):
            return self._number(hint, value, name)
        if get_origin(hint) is Mapping and not _is_plain(value):
            raise self.wrong_type(hint, value, name)
        return super().value(hint, value, name)

    def _number(self, hint: type, value: Any, name: str) -> Any:
        """Return a number unchanged, so that the plan is written back unchanged."""
        if (type(value) is int and abs(value) < LARGEST_INT) or (
            hint is float and type(value) is float and math.isfinite(value)
        ):
            return value
        raise self.wrong_type(hint, value, name)

    def check_unknown(self, kind: type, key: Any, name: str) -> None:
        shown = escape_text(str(key), most=60)
        raise PlanError(f"This is not a plan: {kind.__name__} has no '{shown}'.")

    def missing(self, keys: list[str], name: str) -> Exception:
        return PlanError(f"This is not a plan: {name or 'it'} has no '{keys[0]}'.")

    def wrong_type(self, hint: Any, value: Any, name: str) -> Exception:
        no_list = get_origin(hint) is tuple and not isinstance(value, list)
        return PlanError(
            f"This is not a plan: '{name}' is {'not a list' if no_list else 'invalid'}."
        )


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Tell whether free-form JSON can be written again: no deep nesting, no infinite numbers."""
    if depth > DEEPEST:
        return False
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_plain(v, depth + 1) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | bool | None) or abs(value) < LARGEST_INT
