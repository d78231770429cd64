"""Walking outputs of any kind, and comparing them position by position.

Shares nothing with the package's own verification: see `independent_reference`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOOR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Positions this small beside the whole output are judged on this share of its scale."""
MASKED = 1e6
"""Equal values of this size are masks (such as -1e9), not a scale to judge others by."""


def leaves(value: Any, recorded: frozenset[int] = frozenset()) -> list[Any]:
    """Every tensor, number and text in an output of any kind, in a fixed order.

    >>> leaves({"b": [1, (2.5,)], "a": None})
    [1, 2.5]
    """
    if value is None or (callable(value) and not hasattr(value, "__dict__")):
        return []
    if isinstance(value, Tensor | bool | int | float | complex | str):
        return [value]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value.copy())]
    if isinstance(value, np.generic):
        return [value.item()]
    if id(value) in recorded:
        return []
    recorded = recorded | {id(value)}
    return [leaf for part in _parts(value) for leaf in leaves(part, recorded)]


def _parts(value: Any) -> list[Any]:
    """What an object holds: items of a container and attributes of an object, or both."""
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += list(value.values())
    elif isinstance(value, set | frozenset):
        parts += sorted(value, key=_sum)
    elif isinstance(value, Iterable):
        parts += list(value)
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        parts += [getattr(value, name) for name in names if hasattr(value, name)]
    if not isinstance(value, types.GeneratorType):
        parts += list(getattr(value, "__dict__", {}).values())
    return parts


def _sum(value: Any) -> float:
    return float(value.sum()) if isinstance(value, Tensor) else float(value)


# Comparing outputs.


def difference(want: list[Any], have: list[Any], dtype: torch.dtype) -> tuple[float, str]:
    """Largest relative difference of one position along one axis, and where it is."""
    if len(want) != len(have):
        return math.inf, f"{len(have)} values instead of {len(want)}"
    worst, where = 0.0, ""
    for number, (a, b) in enumerate(zip(want, have, strict=True)):
        error, place = _leaf_difference(a, b, dtype)
        if error > worst:
            worst, where = error, f"output {number}{place}"
    return worst, where


def _leaf_difference(a: Any, b: Any, dtype: torch.dtype) -> tuple[float, str]:
    if isinstance(a, float) and isinstance(b, float):
        a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return (0.0, "") if type(a) is type(b) and a == b else (math.inf, f": {b!r}, not {a!r}")
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf, f": {tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}"
    if a.is_quantized:
        a, b = a.int_repr(), b.int_repr()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return (0.0, "") if torch.equal(a, b) else (math.inf, ": integers differ")
    return _float_difference(a.detach().double(), b.detach().double(), FLOOR[dtype])


def _float_difference(a: Tensor, b: Tensor, floor: float) -> tuple[float, str]:
    strange = ~a.isfinite()
    alike = torch.where(a.isnan(), b.isnan(), a == b)
    if bool((strange & ~alike).any()) or bool((~b.isfinite() & ~strange).any()):
        return math.inf, ": other infinities or NaN"
    mask = strange | (alike & (a.abs() >= MASKED))
    size = a.abs().masked_fill(mask, 0)
    gap = (a - b).masked_fill(mask, 0).abs()
    if not gap.numel() or not bool(gap.any()):
        return 0.0, ""
    least = max(float(size.max()) * floor, 1e-300)
    worst, where = 0.0, ""
    for dim in range(a.ndim) if a.ndim else (None,):
        others = [d for d in range(a.ndim) if d != dim]
        error = _reduce(gap, others) / _reduce(size, others).clamp(min=least)
        if float(error.max()) > worst:
            worst, where = float(error.max()), f", axis {dim}, position {int(error.argmax())}"
    return worst, where


def _reduce(x: Tensor, dims: list[int]) -> Tensor:
    return x.amax(dims) if dims else x
