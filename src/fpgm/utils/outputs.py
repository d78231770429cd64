"""Read a model's outputs: every tensor and every plain value, with its path.

Containers, their subclasses, dataclasses, slots and plain objects are traversed. Values that cannot
be read twice or compared (generators, sets of tensors, modules, opaque objects) raise an error with
their path.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import numbers
import pathlib
import types
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpgm.errors import ModelError

PLAIN_TYPES = (
    bool, int, float, complex, str, bytes, type(None), numbers.Number, enum.Enum, range, slice,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, pathlib.PurePath,
    uuid.UUID, type, types.ModuleType, types.GenericAlias, types.EllipsisType, np.dtype,
)  # fmt: skip
"""Values that are compared by `==`."""


@dataclass(frozen=True)
class Leaf:
    """One tensor, array, list of numbers or plain value in a model's output."""

    path: str
    value: Any

    @property
    def is_tensor(self) -> bool:
        """Whether the model returns it as a tensor."""
        return isinstance(self.value, Tensor)


def read_outputs(value: Any) -> list[Leaf]:
    """List everything a model returns; unsupported values raise an error with type and path.

    >>> [leaf.path for leaf in read_outputs({"boxes": Tensor(2), "info": (1.5, ["a"])})]
    ["out['boxes']", "out['info'][0]", "out['info'][1][0]"]
    >>> read_outputs((n for n in range(3)))
    Traceback (most recent call last):
        ...
    fpgm.errors.ModelError: The model returns a generator at out, which can be read only once: return a list instead.
    """  # noqa: E501
    return list(_OutputReader(strict=True).leaves(value, "out"))


def find_tensors(value: Any) -> list[Tensor]:
    """List the tensors in a nested value; unsupported values are skipped."""
    if _is_plain(value):
        return []  # a stride, a padding, settings: what most modules hold
    leaves = _OutputReader(strict=False).leaves(value, "")
    return [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)]


_NUMBERS = frozenset((int, float, bool, str, type(None)))
_MAX_DEPTH = 4


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Tell whether a value is a number, text, or a few levels of containers of them.

    >>> _is_plain([{"name": "conv", "stride": (2, 2)}, None]), _is_plain([object()])
    (True, False)
    """
    kind = type(value)
    if kind in _NUMBERS:
        return True
    if depth > _MAX_DEPTH:
        return False
    if kind is dict:
        return all(type(key) is str and _is_plain(value[key], depth + 1) for key in value)
    return kind in (tuple, list) and all(_is_plain(item, depth + 1) for item in value)


class _OutputReader:
    """A depth-first walk; objects that contain themselves are entered once."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.open_ids: set[int] = set()

    def leaves(self, value: Any, path: str) -> Iterator[Leaf]:
        if isinstance(value, Tensor):
            if self.strict and value.is_nested:
                raise _unreadable_error(value, path, "return a list of tensors, or a padded tensor")
            if self.strict and type(value).__name__ == "MaskedTensor":  # of torch.masked
                raise _unreadable_error(value, path, "return its data and its mask")
            yield Leaf(path, value)
            yield from self._tensor_attributes(value, path)
        elif isinstance(value, PLAIN_TYPES):
            yield Leaf(path, value)
        elif id(value) not in self.open_ids:
            self.open_ids.add(id(value))
            yield from self._container_leaves(value, path)
            self.open_ids.discard(id(value))

    def _tensor_attributes(self, value: Tensor, path: str) -> Iterator[Leaf]:
        """List tensors in attributes that user code has put on a tensor."""
        held = vars(value)
        if not held or id(value) in self.open_ids:
            return
        self.open_ids.add(id(value))
        strict, self.strict = self.strict, False
        for name, item in list(held.items()):
            yield from (leaf for leaf in self.leaves(item, f"{path}.{name}") if leaf.is_tensor)
        self.strict = strict
        self.open_ids.discard(id(value))

    def _container_leaves(self, value: Any, path: str) -> Iterator[Leaf]:
        if isinstance(value, Mapping):
            items = self._items(value, path)
        elif isinstance(value, Set):
            items = self._members(value, path)
        elif isinstance(value, bytearray | memoryview):
            items = iter([Leaf(path, bytes(value))])
        elif isinstance(value, Sequence):
            items = self._elements(value, path)
        elif hasattr(type(value), "__array__") or hasattr(type(value), "__array_interface__"):
            items = self._array(np.asarray(value), path)
        elif isinstance(value, weakref.ReferenceType):
            items = self.leaves(value(), path)
        else:
            yield from self._object(value, path)
            return
        seen: set[int] = set()
        for leaf in items:
            seen.add(id(leaf.value))
            yield leaf
        # A subclass of a container may hold more in attributes; those that repeat an item do not
        # count twice (Hugging Face outputs are both).
        for name, own in _attributes(value):
            for leaf in self.leaves(own, f"{path}.{name}"):
                if id(leaf.value) not in seen or not leaf.is_tensor:
                    yield leaf

    def _items(self, value: Mapping[Any, Any], path: str) -> Iterator[Leaf]:
        for number, (key, item) in enumerate(value.items()):
            if isinstance(key, Tensor):
                yield Leaf(f"{path}.keys()[{number}]", key)
            name = repr(key) if isinstance(key, PLAIN_TYPES) else f"key {number}"
            yield from self.leaves(item, f"{path}[{name}]")

    def _members(self, value: Set[Any], path: str) -> Iterator[Leaf]:
        """Yield the members of a set, which has no order: plain ones sorted, or a single other."""
        if all(isinstance(item, PLAIN_TYPES) for item in value):
            yield Leaf(path, tuple(sorted(map(repr, value))))
        elif len(value) == 1:
            yield from self.leaves(next(iter(value)), f"{path}.pop()")
        elif self.strict:
            raise _unreadable_error(value, path, "has no order: return a list instead", "which ")
        else:
            for item in value:
                yield from self.leaves(item, path)

    def _elements(self, value: Any, path: str) -> Iterator[Leaf]:
        kinds = {type(item) for item in value}
        if len(value) > 1 and len(kinds) == 1 and kinds <= {bool, int, float}:
            yield Leaf(path, list(value))  # what .tolist() gives: one leaf, not thousands
            return
        names = getattr(value, "_fields", None)
        for number, item in enumerate(value):
            place = f".{names[number]}" if names is not None else f"[{number}]"
            yield from self.leaves(item, path + place)

    def _array(self, value: Any, path: str) -> Iterator[Leaf]:
        if value.dtype.hasobject:
            for number, item in enumerate(value.reshape(-1).tolist()):
                yield from self.leaves(item, f"{path}.flat[{number}]")
        else:
            yield Leaf(path, value)

    def _object(self, value: Any, path: str) -> Iterator[Leaf]:
        if _is_plain_function(value):
            yield Leaf(path, value)
            return
        if self.strict:
            _check_readable(value, path)
        if isinstance(value, BaseException):
            yield from self.leaves(value.args, f"{path}.args")
        for name, own in _attributes(value):
            yield from self.leaves(own, f"{path}.{name}")


def _check_readable(value: Any, path: str) -> None:
    if isinstance(value, Iterator):
        raise _unreadable_error(
            value, path, "can be read only once: return a list instead", "which "
        )
    if isinstance(value, nn.Module):
        raise _unreadable_error(value, path, "is a module: return tensors instead", "which ")
    if callable(value) and not dataclasses.is_dataclass(value):
        raise _unreadable_error(
            value, path, "is a function: return what it computes instead", "which "
        )
    if not hasattr(value, "__dict__") and not _slots(type(value)):
        why = "whose contents cannot be read: return tensors in lists, dicts or dataclasses"
        raise _unreadable_error(value, path, why)


def _unreadable_error(value: Any, path: str, why: str, link: str = "") -> ModelError:
    name = type(value).__name__
    if isinstance(value, Tensor):
        name, problem = (
            ("nested tensor", "whose rows differ in size")
            if value.is_nested
            else (name, "which few operators support")
        )
        link, why = "", f"{problem}: {why}"
    article = "an" if name[0].lower() in "aeiou" else "a"
    return ModelError(f"The model returns {article} {name} at {path}, {link}{why}.")


def _is_plain_function(value: Any) -> bool:
    """Return whether a function has no captured values, so that both models return the same one."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, types.ModuleType | type | types.NoneType)
    if not isinstance(value, types.FunctionType) or value.__closure__:
        return False
    held = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return all(isinstance(item, PLAIN_TYPES) for item in held)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes: fields of a dataclass, slots, and its dict."""
    if isinstance(value, type):
        return
    names = dict.fromkeys((*_slots(type(value)), *getattr(value, "__dict__", {})))
    for name in names:
        if isinstance(name, str) and hasattr(value, name):
            yield name, getattr(value, name)


def _slots(kind: type) -> list[str]:
    """List the names of an object's slots, those of its base classes first.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> _slots(Point)
    ['x', 'y']
    """
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            hidden = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def find_nan(outputs: list[Leaf]) -> set[str]:
    """Return the paths of the outputs that hold NaN."""
    tensors = {leaf.path: to_dense(leaf.value) for leaf in outputs if leaf.is_tensor}
    return {path for path, tensor in tensors.items() if bool(tensor.isnan().any())}


def to_dense(value: Tensor) -> Tensor:
    """Return the numbers of a tensor, which may be sparse or quantized, as a regular tensor."""
    value = value.detach()
    value = value.dequantize() if value.is_quantized else value
    dense: Tensor = value.to_dense() if value.layout != torch.strided else value
    return dense
