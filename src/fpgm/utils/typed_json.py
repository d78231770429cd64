"""Dataclasses from JSON that anyone may have written: names, kinds and sizes of all that is in it.

Every fault is a `PlanError` in one line. What values mean is left to the dataclass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from fpgm.errors import PlanError
from fpgm.utils.text import printable, shorten


class Part(Protocol):
    """A dataclass whose first field names what it is about."""

    def problem(self) -> str | None:
        """What cannot be meant, or None."""


T = TypeVar("T")
P = TypeVar("P", bound=Part)

LARGEST_INT = 2**63
"""Numbers in a plan count channels, parameters or operations: all fit into 64 bits."""
DEEPEST = 5
"""Levels of tables and lists in free-form values; planners write two."""


def build(kind: type[T], item: Any) -> T:
    """Make a dataclass of a JSON object, if names and kinds of its values are right."""
    if not isinstance(item, Mapping):
        raise PlanError(f"This is not a plan: a {kind.__name__} is a {type(item).__name__}.")
    check_names(kind, item)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
    check_kinds(kind, values)
    return kind(**values)


def build_all(kind: type[P], items: Sequence[Any]) -> tuple[P, ...]:
    """Make dataclasses of JSON objects, if all they say can be meant."""
    made = tuple(build(kind, item) for item in items)
    for part in made:
        if (problem := part.problem()) is not None:
            about = getattr(part, fields(kind)[0].name)  # type: ignore[arg-type]
            name = printable(about if isinstance(about, str) else shorten(about), 200)
            raise PlanError(f"This is not a plan: it says of '{name}' that {problem}.")
    return made


def list_in(raw: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list from a JSON object, or refuse what stands there instead."""
    if not isinstance(raw[key], list):
        raise PlanError(f"This is not a plan: '{key}' is not a list.")
    found: list[Any] = raw[key]
    return found


def check_names(kind: type, item: Mapping[str, Any]) -> None:
    """Refuse what the dataclass has no field for."""
    if unknown := set(item) - {f.name for f in fields(kind)}:
        name = printable(min(unknown), most=60)
        raise PlanError(f"This is not a plan: {kind.__name__} has no '{name}'.")


def check_kinds(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse values of another kind than their field's annotation."""
    for name, hint in _kinds(kind).items():
        if name in values and not is_a(values[name], hint):
            raise PlanError(f"This is not a plan: '{name}' of a {kind.__name__} is of no use.")


@cache
def _kinds(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated kind, for the few kinds a plan is made of.

    >>> is_a((1, 2), tuple[int, ...]), is_a((1, "2"), tuple[int, ...]), is_a(True, int)
    (True, False, False)
    >>> is_a(2**63, int), is_a(float("nan"), float)
    (False, False)
    """
    inside = get_args(hint)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in inside
    if hint == tuple[int, ...]:  # most of a plan
        return isinstance(value, tuple) and all(
            type(n) is int and -LARGEST_INT < n < LARGEST_INT for n in value
        )
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(is_a(item, inside[0]) for item in value)
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping) and _is_plain(value)
    if inside:
        return any(is_a(value, one) for one in inside)
    if hint is float:
        return is_a(value, int) or (isinstance(value, float) and math.isfinite(value))
    if hint is int:
        return type(value) is int and abs(value) < LARGEST_INT
    return isinstance(value, hint)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether free-form JSON can be written again: no deep nesting, no number without a size."""
    if depth > DEEPEST:
        return False
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_plain(v, depth + 1) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    return isinstance(value, str | bool | None) or is_a(value, float)
