"""Operators that sort, pick or collect along one axis: channels along other axes pass through.

Positions along the axis depend on values, so channels along it are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.elementwise import combine_fields, merge
from fpgm.tracing.ops.reduction import along, reduce


def _gather(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    _combine_except(tracer, name, args[1], [args[0], args[2]], out)


def _scatter(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    source = args[3] if len(args) > 3 else kwargs.get("src", kwargs.get("value"))
    tensors = [args[0], args[2], *([source] if isinstance(source, Tensor) and source.ndim else [])]
    _combine_except(tracer, name, args[1], tensors, out)


def _index_add(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.freeze(tracer.fields(args[2]), f"'{name}' uses them as positions")
    _combine_except(tracer, name, args[1], [args[0], args[3]], out)


def _index_fill(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.freeze(tracer.fields(args[2]), f"'{name}' uses them as positions")
    _combine_except(tracer, name, args[1], [args[0]], out)


def _index_put(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Relate `x[mask] = number` to its mask; freeze labels at other fixed positions."""
    x, (index, *more), values = args[:3]
    masks = not more and index is not None and index.dtype == torch.bool
    if not masks or values.numel() > 1:
        for tensor in (x, values, index, *more):
            if tensor is not None:
                tracer.freeze(tracer.fields(tensor), "values are written to fixed positions")
        return
    wide = index.reshape(*index.shape, *[1] * (x.ndim - index.ndim))
    tracer.set(wide, [f.reshape(*f.shape, *wide.shape[f.ndim :]) for f in tracer.fields(index)])
    tracer.set(out, combine_fields(tracer, [x, wide], tuple(out.shape)))


def _combine_except(
    tracer: LabelTracer, name: str, dim: int, tensors: Sequence[Tensor], out: Tensor
) -> None:
    """Relate the labels of tensors that are combined position by position, except along one dim."""
    dim %= max(1, out.ndim)
    merged: list[Tensor] = []
    kept_fields: list[list[Tensor]] = []
    for tensor in tensors:
        kept_fields.append([])
        for f in tracer.fields(tensor):
            part_only = any(tensor.shape[d] != out.shape[d] for d in lb.axes(f) if d != dim)
            if f.shape[dim] > 1 or part_only:
                tracer.freeze([f], f"'{name}' runs along the channels")
            else:
                kept_fields[-1].append(f)
                merged = merge(tracer, merged, f)
    for f in merged:
        for tensor, fields in zip(tensors, kept_fields, strict=True):
            fixed = any(tensor.shape[d] > 1 for d in lb.axes(f))
            if fixed and not any(lb.varies(g, lb.axes(f)) for g in fields):
                tracer.freeze([f], "they are combined with a tensor of fixed size")
    tracer.set(out, merged)


def _search(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Look values up in one row of bounds, each channel separately."""
    x, bounds = (args[0], args[1]) if name == "bucketize" else (args[1], args[0])
    tracer.freeze(tracer.fields(bounds), f"'{name}' reads them")
    if not isinstance(x, Tensor):
        return
    if bounds.ndim > 1:
        tracer.freeze(tracer.fields(x), f"'{name}' reads them")
    else:
        tracer.set(out, tracer.fields(x))


RULES: dict[str, Rule] = {
    **{name: along(1) for name in ("sort", "argsort", "cummax", "cummin", "logcumsumexp")},
    "topk": along(2),
    "kthvalue": reduce(2, default=-1),
    "mode": reduce(1, default=-1),
    "gather": _gather,
    **{name: _scatter for name in ("scatter", "scatter_add", "scatter_reduce")},
    "index_add": _index_add,
    "index_fill": _index_fill,
    "index_put": _index_put,
    **{name: _search for name in ("bucketize", "searchsorted")},
}
