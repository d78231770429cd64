"""Infer the results of heavy operators by shape alone: labels follow shapes, not values.

A model that reads values (`if x.max() > 0`, `x.nonzero()`) may take a different branch with these
zeros. In that case, and after any other error, the run is repeated with real values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

Infer = Callable[[tuple[Any, ...]], Tensor | tuple[Tensor, ...] | None]


class ValuesNeededError(BaseException):
    """The model's own code reads values; not an `Exception`, which that code might catch."""


_NO_OPTIONS: Mapping[str, Any] = {}

_LOOKS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def infer_shape(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NO_OPTIONS
) -> Tensor | tuple[Tensor, ...] | None:
    """Return zeros in the shape of a heavy operator's result; None if it has to run.

    If arguments do not fit together, the operator itself runs and raises its own error.
    Raises `ValuesNeededError` at an operator that reads a number or picks by a mask.

    >>> x, weight = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
    >>> call = (x, weight, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    >>> infer_shape(torch.ops.aten.convolution.default, call).shape
    torch.Size([1, 4, 4, 4])
    """
    infer = _RESULTS.get(func)
    if infer is not None:
        return None if kwargs else infer(args)  # which may be another dtype
    if _looks_at_values(func, args):
        raise ValuesNeededError
    return None


def depends_on_shapes_only(func: Any) -> bool:
    """Tell whether an operator whose result is inferred can fail only because of its shapes.

    >>> depends_on_shapes_only(torch.ops.aten.convolution.default)
    True
    """
    return func in _RESULTS


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _indices(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return indices of a pooling's maxima: the first position of every map."""
    return torch.zeros(shape, dtype=torch.int64, device=like.device)


def _same_shape(args: tuple[Any, ...]) -> Tensor | None:
    return torch.zeros_like(args[0]) if _is_plain(args[0]) else None


def _in_place(args: tuple[Any, ...]) -> Tensor | None:
    x: Tensor = args[0]
    return x if _is_plain(x) and not isinstance(x, nn.Parameter) else None


def _pooled(args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    shape = _max_pool(*args)
    return None if shape is None else (_zeros(args[0], shape), _indices(args[0], shape))


def _normalized(args: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    return _batch_norm(*args)


def _of_shape(shape_of: Callable[..., list[int] | None], count: int) -> Infer:
    """Return zeros in the shape that a function finds, from this number of arguments."""

    def infer(args: tuple[Any, ...]) -> Tensor | None:
        shape = shape_of(*args) if len(args) == count else None
        return None if shape is None else _zeros(args[0], shape)

    return infer


def _is_plain(x: Tensor) -> bool:
    return x.is_floating_point() and x.is_contiguous()


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, training: bool, momentum: float, eps: float,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Infer the results of `aten.native_batch_norm`, whose arguments these are, as zeros.

    None if it cannot run on them.
    """
    given = [t for t in (weight, bias, mean, variance) if t is not None]
    fits = x.ndim > 1 and _is_plain(x) and _alike(x, *given)
    if not fits or any(t.shape != x.shape[1:2] for t in given):
        return None
    if not training and (mean is None or variance is None):
        return None
    statistics = [x.shape[1] if training else 0]
    return torch.zeros_like(x), _zeros(x, statistics), _zeros(x, statistics)


def _looks_at_values(func: Any, args: tuple[Any, ...]) -> bool:
    if isinstance(func, HigherOrderOperator):
        return True
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return _may_look(func)


@cache
def _may_look(func: Any) -> bool:
    """Tell whether an operator reads values, or is a custom one, for which this is unknown."""
    return func.namespace not in ("aten", "prims") or not _LOOKS.isdisjoint(func.tags)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> list[int] | None:
    """Infer the output shape of `aten.convolution`, whose arguments these are; None if invalid."""
    reads, writes = weight.shape[1] * groups, weight.shape[0]
    if transposed:
        reads, writes = writes, reads
    lists = (stride, padding, dilation, output_padding)
    if any(len(numbers) != x.ndim - 2 for numbers in lists):
        return None
    if x.ndim != weight.ndim or x.shape[1] != reads or not _alike(x, weight, bias):
        return None
    if bias is not None and len(bias) != writes:
        return None
    sizes = []
    for size, kernel, step, pad, gap, extra in zip(
        x.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, strict=True
    ):
        reach = gap * (kernel - 1)
        if transposed and extra >= max(step, gap):
            return None
        if transposed:
            sizes.append((size - 1) * step - 2 * pad + reach + extra + 1)
        else:
            sizes.append((size + 2 * pad - reach - 1) // step + 1)
    return [x.shape[0], writes, *sizes] if min(sizes) > 0 else None


def _product(a: Tensor, b: Tensor) -> list[int] | None:
    fits = a.ndim == b.ndim and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    return [*a.shape[:-1], b.shape[-1]] if fits and _alike(a, b) else None


def _add_product(added: Tensor, a: Tensor, b: Tensor) -> list[int] | None:
    shape = _product(a, b)
    fits = shape is not None and list(added.shape) in (shape[-1:], shape) and _alike(added, a)
    return shape if fits else None


def _max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> list[int] | None:
    """Infer the output shape of `aten.max_pool2d`, whose arguments these are.

    Sizes are those of torch's `pooling_output_shape`; None where torch raises or warns.
    """
    lists = [_both(numbers) for numbers in (kernel, stride or kernel, padding, dilation)]
    if x.ndim != 4 or not x.is_floating_point() or any(len(numbers) != 2 for numbers in lists):
        return None
    sizes = []
    for size, window, step, pad, gap in zip(x.shape[2:], *lists, strict=True):
        if window < 1 or step < 1 or gap < 1 or not 0 <= 2 * pad <= window:
            return None
        room = size + 2 * pad - gap * (window - 1) - 1
        count = (room + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (count - 1) * step >= size + pad:
            count -= 1  # the last window would begin in the padding
        sizes.append(count)
    return [*x.shape[:2], *sizes] if min(*x.shape, *sizes) > 0 else None


def _average_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> list[int] | None:
    return _max_pool(x, kernel, stride, padding, (1, 1), ceil_mode) if divisor is None else None


def _averaged(args: tuple[Any, ...]) -> Tensor | None:
    shape = _average_pool(*args) if _is_plain(args[0]) else None
    return None if shape is None else _zeros(args[0], shape)


def _joined(args: tuple[Any, ...]) -> Tensor | None:
    """Join plain tensors; torch leaves out an empty one of another shape."""
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    first = parts[0]
    if not all(_is_plain(x) and x.ndim == first.ndim and x.numel() for x in parts):
        return None
    if not _alike(first, *parts) or not -first.ndim <= dim < first.ndim:
        return None
    shapes = [list(x.shape) for x in parts]
    lengths = [shape.pop(dim) for shape in shapes]
    if any(shape != shapes[0] for shape in shapes):
        return None
    shape = list(first.shape)
    shape[dim] = sum(lengths)
    return _zeros(first, shape)


def _reduced(args: tuple[Any, ...]) -> Tensor | None:
    """Take a mean or a sum over some dims."""
    x, dims, keep = args[0], args[1] if len(args) > 1 else None, len(args) > 2 and args[2]
    if not dims or not _is_plain(x) or not all(-x.ndim <= d < x.ndim for d in dims):
        return None
    gone = {d % x.ndim for d in dims}
    if len(gone) < len(dims):
        return None
    sizes = enumerate(x.shape)
    return _zeros(x, [1 if d in gone else n for d, n in sizes if keep or d not in gone])


def _combined(args: tuple[Any, ...]) -> Tensor | None:
    """Add or multiply plain tensors, one of which may be broadcast in space."""
    x, other = args
    if not isinstance(x, Tensor) or not isinstance(other, Tensor) or not _alike(x, other):
        return None
    if not _is_plain(x) or not _is_plain(other) or x.ndim != other.ndim:
        return None
    if x.shape == other.shape:
        return torch.zeros_like(x)
    large = x if x.numel() > other.numel() else other
    small = other if large is x else x
    fits = large.shape[:2] == small.shape[:2] and all(n == 1 for n in small.shape[2:])
    return torch.zeros_like(large) if fits else None


def _combined_in_place(args: tuple[Any, ...]) -> Tensor | None:
    x, other = args
    fits = isinstance(other, Tensor) and x.shape == other.shape and _alike(x, other)
    return _in_place(args) if fits else None


def _both(numbers: Sequence[int]) -> Sequence[int]:
    """Repeat a single number for both dims."""
    return [*numbers, *numbers] if len(numbers) == 1 else numbers


def _alike(first: Tensor, *others: Tensor | None) -> bool:
    dtype, device = first.dtype, first.device
    return all(t is None or (t.dtype == dtype and t.device == device) for t in others)


_ATEN = torch.ops.aten
_SAME_SHAPE = frozenset(
    (_ATEN.relu.default, _ATEN.silu.default, _ATEN.hardswish.default, _ATEN.hardsigmoid.default,
     _ATEN.sigmoid.default, _ATEN.gelu.default, _ATEN.hardtanh.default)
)  # fmt: skip
_IN_PLACE = frozenset(
    (_ATEN.relu_.default, _ATEN.silu_.default, _ATEN.hardswish_.default, _ATEN.hardtanh_.default,
     _ATEN.hardsigmoid_.default, _ATEN.sigmoid_.default)
)  # fmt: skip
"""Activations, which are not computed on zeros."""
_RESULTS: dict[Any, Infer] = {
    **{func: _same_shape for func in _SAME_SHAPE},
    **{func: _in_place for func in _IN_PLACE},
    **{func: _combined for func in (_ATEN.add.Tensor, _ATEN.mul.Tensor)},
    **{func: _combined_in_place for func in (_ATEN.add_.Tensor, _ATEN.mul_.Tensor)},
    **{func: _reduced for func in (_ATEN.mean.dim, _ATEN.sum.dim_IntList)},
    _ATEN.avg_pool2d.default: _averaged,
    _ATEN.cat.default: _joined,
    _ATEN.max_pool2d_with_indices.default: _pooled,
    _ATEN.native_batch_norm.default: _normalized,
    _ATEN.convolution.default: _of_shape(_convolution, 9),
    _ATEN.mm.default: _of_shape(_product, 2),
    _ATEN.bmm.default: _of_shape(_product, 2),
    _ATEN.addmm.default: _of_shape(_add_product, 3),
}
"""Functions that infer an operator's result from its arguments; None if it has to run."""
