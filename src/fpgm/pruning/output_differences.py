"""Measure how much two outputs of the same form differ, each channel relative to its own scale.

An element's error is relative to itself or to the typical size of neighboring values, whichever is
larger. So a class score next to box coordinates is compared on the scale of scores. If that typical
size is far below the rest of the tensor, rounding of the rest limits the precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpgm.utils.outputs import Leaf, to_dense
from fpgm.utils.text import format_shape

_ROUNDING = 5000
"""Units in the last place that may be lost where large and small values are added."""

_MAX_ACROSS = 0.01
"""The scale of small values is at most this fraction of the scale of large values."""

_MIN_SCALE = 1e-8
_MASK, _EQUAL_MASK = 1e7, 1e4
"""Values this large (the second: if equal on both sides) mask others and say nothing of scale."""


@dataclass(frozen=True)
class Difference:
    """The largest error in one output, and where it is."""

    error: float = 0.0
    where: str = ""


def form_problem(want: list[Leaf], have: list[Leaf]) -> str:
    """Describe how the forms of two outputs differ; return an empty text if they do not."""
    paths, others = [leaf.path for leaf in want], [leaf.path for leaf in have]
    if paths != others:
        lost = [path for path in paths if path not in others]
        new = [path for path in others if path not in paths]
        which = (
            f"{lost[0]} is missing"
            if lost
            else f"{new[0]} is new"
            if new
            else "in a different order"
        )
        return f"The compact model returns {len(have)} values instead of {len(want)}: {which}."
    for a, c in zip(want, have, strict=True):
        one, other = _form(a.value), _form(c.value)
        if one != other:
            return f"The compact model returns {other} instead of {one} at {a.path}."
    return ""


def difference(want: Leaf, have: Leaf, precision: torch.dtype, tolerance: float) -> Difference:
    """Compare two leaves of the same form."""
    a, c = as_tensor(want.value), as_tensor(have.value)
    if a is None or c is None:
        same = _plain_equal(want.value, have.value)
        return Difference() if same else Difference(1.0, f"{want.path} (not equal)")
    if not a.is_floating_point() and not a.is_complex():
        return _discrete(a, c, want.path)
    cast = torch.finfo(a.dtype).eps if a.dtype != precision and not a.is_complex() else 0.0
    across = min(_MAX_ACROSS, _ROUNDING * torch.finfo(precision).eps / tolerance)
    ratio = _relative(a, c, tolerance, cast, across)
    worst = float(ratio.max()) if ratio.numel() else 0.0
    return Difference(worst, want.path + _place(ratio)) if worst else Difference()


def distance(a: Leaf, b: Leaf) -> float:
    """Return how far an output has moved, relative to its typical size."""
    x, y = as_tensor(a.value), as_tensor(b.value)
    if x is None or y is None:
        return 0.0 if _plain_equal(a.value, b.value) else 1.0
    if x.shape != y.shape or x.dtype != y.dtype:
        return 1.0
    if not x.is_floating_point() and not x.is_complex():
        return float((x != y).double().mean()) if x.numel() else 0.0
    ratio = _relative(x, y, torch.inf, 0.0, 1.0)
    return float(ratio.max()) if ratio.numel() else 0.0


def as_tensor(value: Any) -> Tensor | None:
    """Return a leaf's numbers as a tensor; None if it holds none."""
    if isinstance(value, Tensor):
        return to_dense(value)
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, np.generic):
            return torch.from_numpy(np.asarray(value))
        if isinstance(value, float) or (isinstance(value, list) and type(value[0]) is float):
            return torch.tensor(value, dtype=torch.float64)
        if isinstance(value, complex | list):
            return torch.tensor(value)
    except (TypeError, RuntimeError, ValueError, OverflowError):
        return None
    return None


def _form(value: Any) -> str:
    """Describe what must agree before values are compared."""
    tensor = as_tensor(value)
    if tensor is None:
        return f"a {type(value).__name__}"
    return f"{format_shape(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _plain_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)


def _discrete(a: Tensor, c: Tensor, path: str) -> Difference:
    other = a != c
    count = int(other.sum())
    if not count:
        return Difference()
    return Difference(1.0, f"{path}{_place(other.double())}, where {count} of {a.numel()} differ")


def _relative(a: Tensor, c: Tensor, tolerance: float, cast: float, across: float) -> Tensor:
    """Compute every element's error relative to itself or to typical neighboring values."""
    if a.is_complex():
        a, c = torch.view_as_real(a.resolve_conj()), torch.view_as_real(c.resolve_conj())
    a, c = a.double(), c.double()
    same = (a == c) | (a.isnan() & c.isnan())
    size = a.abs()
    error = ((a - c).abs() - 4 * cast * size).clamp(min=0)
    error = torch.where(error.isfinite(), error, torch.inf).masked_fill(same, 0)
    size = torch.where(size.isfinite(), size, 0.0)
    low, high = _scales(size, same)
    near = error / torch.maximum(size, low)
    fair = error / torch.maximum(size, torch.maximum(low, min(across, 1.0) * high))
    return torch.where(fair > tolerance, near, fair)


def _scales(size: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """Return the typical size around each element: the smallest along any axis, and the largest."""
    counts = (size < _MASK) & ~(same & (size > _EQUAL_MASK))
    values, counted = size * counts, counts.double()
    means = [values.sum() / counted.sum().clamp(min=1)]
    for dim in range(size.ndim):
        others = [d for d in range(size.ndim) if d != dim]
        if size.shape[dim] > 1:
            total = values.sum(others, keepdim=True) if others else values
            number = counted.sum(others, keepdim=True) if others else counted
            means.append(total / number.clamp(min=1))
    low = high = means[0]
    for mean in means[1:]:
        low, high = torch.minimum(low, mean), torch.maximum(high, mean)
    return low.clamp(min=_MIN_SCALE), high.clamp(min=_MIN_SCALE)


def _place(ratio: Tensor) -> str:
    """Name the worst element, and the axis along which its slice stands out."""
    if ratio.numel() < 2:
        return ""
    index = [int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)]
    ratio = torch.where(ratio.isfinite(), ratio, 1.0)
    outstanding = []
    for dim in range(ratio.ndim):
        slices = ratio.movedim(dim, 0).flatten(1).amax(1) if ratio.ndim > 1 else ratio
        typical = float(slices.median()) if len(slices) > 1 else float(slices.max())
        outstanding.append((float(slices[index[dim]]) / (typical + 1e-300), dim == 1, dim))
    dim = max(item for item in outstanding if ratio.shape[item[2]] > 1)[2]
    at = ", ".join(map(str, index))
    return f", channel {index[dim]} of dim {dim} (at [{at}])"
