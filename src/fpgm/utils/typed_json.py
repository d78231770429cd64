"""Build dataclasses from untrusted JSON or TOML, by the annotations of their fields.

Names, types and sizes are checked here; the dataclass checks the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class FieldTypeError(ValueError):
    """A value of another type than its field has."""


class Decoder:
    """Builds dataclasses from nested tables; subclasses adapt the errors and the accepted values.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Point:
    ...     at: tuple[float, ...]
    ...     name: str | None = None
    >>> Decoder().record(Point, {"at": [1, 2.5]})
    Point(at=(1.0, 2.5), name=None)
    >>> Decoder().record(Point, {"at": ["1"]})
    Traceback (most recent call last):
        ...
    fpgm.utils.typed_json.FieldTypeError: at has the wrong type
    """

    error: type[Exception] = FieldTypeError
    """What `wrong_type`, `unknown` and `missing` give."""

    def record(self, kind: type[T], item: Any, name: str = "") -> T:
        """Build a dataclass from a table, called `name` in errors."""
        if not isinstance(item, Mapping):
            raise self.wrong_type(kind, item, name)
        hints, needed = _fields(kind)  # type: ignore[arg-type]
        for key in item:
            if key not in hints:
                self.check_unknown(kind, key, name)
        if missing := [key for key in needed if key not in item]:
            raise self.missing(missing, name)
        return kind(
            **{
                key: self.value(hint, item[key], _join(name, key))
                for key, hint in hints.items()
                if key in item
            }
        )

    def value(self, hint: Any, value: Any, name: str) -> Any:
        """Convert a value to its annotated type if this is lossless."""
        origin, inside = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            return self._union_value(inside, value, name)
        if is_dataclass(hint):
            return self.record(hint, value, name)  # type: ignore[arg-type]
        if origin is Literal and value in inside:
            return value
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(self.value(inside[0], item, name) for item in value)
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            return {str(key): self.value(inside[1], item, name) for key, item in value.items()}
        if hint is float and type(value) is int and abs(value) < 2**1023:
            return float(value)
        if hint is Any or type(value) is hint:
            return value
        raise self.wrong_type(hint, value, name)

    def _union_value(self, hints: tuple[Any, ...], value: Any, name: str) -> Any:
        if value is None and NoneType in hints:
            return None
        *others, last = (hint for hint in hints if hint is not NoneType)
        for hint in others:
            with suppress(self.error):
                return self.value(hint, value, name)
        if others and all(get_origin(hint) is Literal or type(hint) is type for hint in hints):
            with suppress(self.error):
                return self.value(last, value, name)
            raise self.wrong_type((*others, last), value, name)
        return self.value(last, value, name)

    def check_unknown(self, kind: type, key: Any, name: str) -> None:
        """Ignore a key that the dataclass has no field for, or raise an error."""

    def missing(self, keys: list[str], name: str) -> Exception:
        """Create the error for missing fields."""
        return self.error(f"{_join(name, keys[0])} is missing")

    def wrong_type(self, hint: Any, value: Any, name: str) -> Exception:
        """Create the error for a value that has not this type, or none of several."""
        return self.error(f"{name or 'it'} has the wrong type")


@cache
def _fields(kind: type) -> tuple[dict[str, Any], list[str]]:
    """Return a dataclass's annotations, and the names of fields without a default."""
    hints = get_type_hints(kind)
    own_fields = fields(kind)
    needed = [f.name for f in own_fields if f.default is MISSING and f.default_factory is MISSING]
    return {f.name: hints[f.name] for f in own_fields}, needed


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
