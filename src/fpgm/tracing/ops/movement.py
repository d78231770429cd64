"""Data movement: the same operator, applied to the label field, is the rule.

Fields have size 1 where labels do not change, so every rule first checks whether the moved dims
have labels. A view that splits an axis keeps equally many channels in each part. It is one of the
`FIXED_SIZE_OPS`: its sizes may be constants in the user's code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.elementwise import combine_fields
from fpgm.tracing.ops.slice_concat import strided_index


def _as_is(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    tracer.set(out, tracer.fields(args[0]))
    tracer.note_passed(args[0], out)


def _view(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = args[0]
    fields = []
    for field in tracer.fields(x):
        _tie_interleaved(tracer, field, tuple(x.shape), tuple(out.shape))
        moved = lb.shrink(lb.reshape(field, tuple(x.shape), tuple(out.shape)))
        split = lb.axes(moved)
        if len(split) > len(lb.axes(field)):
            _split_axis(tracer, moved, split)
        fields.append(moved)
    tracer.set(out, fields)


def _tie_interleaved(
    tracer: LabelTracer, field: Tensor, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """Tie the k-th channels of stacked branches that alternate once their dims are merged.

    Branches that are concatenated only need to keep equally many, which stacking already requires.
    """
    if len(lb.axes(field)) < 2 or not tracer.may_assume_sizes:
        return
    for ins, outs in lb.dim_groups(before, after):
        varying = [d for d in ins if field.shape[d] > 1]
        for dim in varying[1:] if len(outs) < len(ins) else ():
            corner = field.movedim(dim, 0).reshape(field.shape[dim], -1)[:2, 0]
            if tracer.are_stacked(corner[0], corner[1]):
                tracer.tie(field, [dim])


def _split_axis(tracer: LabelTracer, field: Tensor, dims: list[int]) -> None:
    """Handle one axis split into several: tie inner rows, balance outer blocks."""
    if not tracer.may_assume_sizes:
        return
    main = lb.varying_dim(field, dims)
    tracer.tie(field, [d for d in dims if d > main])
    outer = math.prod(field.shape[d] for d in dims if d < main)
    rows = field
    for d in dims:
        if d > main:
            rows = rows.narrow(d, 0, 1)
    tracer.balance(rows.reshape(outer, -1))


def _permute(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.set(out, [f.permute(args[1]) for f in tracer.fields(args[0])])


def _transpose(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    a, b = args[1:3] if len(args) > 2 else (0, -1)
    tracer.set(out, [f.transpose(a, b) if f.ndim > 1 else f for f in tracer.fields(args[0])])


def _unsqueeze(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.set(out, [f.unsqueeze(args[1]) for f in tracer.fields(args[0])])


def _squeeze(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = args[0]
    tracer.set(out, [lb.reshape(f, tuple(x.shape), tuple(out.shape)) for f in tracer.fields(x)])


def _lay_out(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Handle explicit sizes and strides: labels pass where these do not change."""
    x, fields = args[0], tracer.fields(args[0])
    steps = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (x, out)]
    if x.shape != out.shape or steps[0] != steps[1] or x.storage_offset() != out.storage_offset():
        tracer.freeze(fields, f"'{name}' uses fixed sizes or strides")
        fields = ()
    tracer.set(out, fields)


def _expand(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.set(out, [lb.lift(f, out.ndim) for f in tracer.fields(args[0])])


def _repeat(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    times = args[1]
    fields = []
    for f in tracer.fields(args[0]):
        f = lb.lift(f, out.ndim)
        fields.append(
            f.repeat([n if size > 1 else 1 for n, size in zip(times, f.shape, strict=True)])
        )
    tracer.set(out, fields)


def _flip(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.set(out, [f.flip(args[1]) for f in tracer.fields(args[0])])


def _roll(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    fields = tracer.fields(args[0])
    dims = [d % out.ndim for d in (args[2] if len(args) > 2 else kwargs.get("dims", []))]
    moved = [f for f in fields if lb.varies(f, dims or range(f.ndim))]
    tracer.freeze(moved, "channels are rolled by a fixed number")
    tracer.set(out, [f for f in fields if not any(f is m for m in moved)])


def _index(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Handle fancy indexing: labels along the indexed axes are frozen, others pass."""
    x, indices = args[0], args[1]
    dims: list[int] = []
    position = 0
    for index in indices:
        width = index.ndim if index is not None and index.dtype == torch.bool else 1
        if index is not None:
            dims += range(position, position + width)
        position += width
    good = []
    for f in tracer.fields(x):
        if lb.varies(f, dims):
            tracer.freeze([f], "channels are picked by fixed positions")
        else:
            picked = lb.spread(f, tuple(x.shape), dims)
            good.append(torch.ops.aten.index.Tensor(picked, list(indices)))
    tracer.set(out, lb.tidy(good))


def _index_select(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, dim, index = args[0], args[1] % args[0].ndim, args[2]
    fields = []
    for f in tracer.fields(x):
        if f.shape[dim] == 1:
            fields.append(f)
        elif tracer.trusts_positions:
            fields.append(f.index_select(dim, index))
        else:
            tracer.freeze([f], "channels are picked by fixed positions")
    tracer.set(out, fields)
    tracer.note_picked(x, out)


def _index_copy(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    base, dim, index, source = args[0], args[1] % args[0].ndim, args[2], args[3]
    tracer.freeze(tracer.fields(base), "some of its channels are overwritten")
    fields = []
    for f in tracer.fields(source):
        if f.shape[dim] > 1 and tracer.trusts_positions:
            shape = [base.shape[d] if d == dim else f.shape[d] for d in range(f.ndim)]
            fields.append(torch.full(shape, lb.ANY).index_copy(dim, index, f))
        elif f.shape[dim] > 1:
            tracer.freeze([f], "channels are written to fixed positions")
        else:
            fields.append(f)
    tracer.set(out, fields)


def _pixel_shuffle(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, factor = args[0], args[1]
    channel = x.ndim - 3
    fields = []
    for f in tracer.fields(x):
        if lb.varies(f, (x.ndim - 2, x.ndim - 1)):
            tracer.freeze([f], "labels along space are shuffled")
            continue
        if f.shape[channel] > 1:
            rows = f.movedim(channel, 0).reshape(f.shape[channel] // factor**2, factor**2, -1)
            tracer.tie(rows, [1])
            f = f[strided_index(channel, factor**2)]
        fields.append(f)
    tracer.set(out, fields)


def _pixel_unshuffle(
    tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor
) -> None:
    x, factor = args[0], args[1]
    fields = tracer.fields(x)
    if any(lb.varies(f, (x.ndim - 2, x.ndim - 1)) for f in fields):
        tracer.freeze(fields, "labels along space are shuffled")
        return
    channel = x.ndim - 3
    tracer.set(
        out,
        [f.repeat_interleave(factor**2, channel) if f.shape[channel] > 1 else f for f in fields],
    )


def _channel_shuffle(
    tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor
) -> None:
    x, groups = args[0], args[1]
    fields = []
    for f in tracer.fields(x):
        if f.shape[1] > 1:
            rows = f.reshape(f.shape[0], groups, -1, *f.shape[2:])
            tracer.balance(rows[0].reshape(groups, -1))
            f = rows.transpose(1, 2).reshape(f.shape)
        fields.append(f)
    tracer.set(out, fields)


def _write_rows(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Relate both sides of `copy_` into a view; the base already has the same labels."""
    target, source = args[0], args[1]
    if source.ndim:
        tracer.set(out, combine_fields(tracer, [target, source], tuple(out.shape)))


_AS_IS = (
    "alias", "clone", "detach", "contiguous", "_to_copy", "lift_fresh", "lift", "lift_fresh_copy",
    "positive", "_conj", "resolve_conj", "resolve_neg", "view_as",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **{name: _as_is for name in _AS_IS},
    **{name: _view for name in ("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")},
    "permute": _permute,
    **{name: _transpose for name in ("t", "transpose")},
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    **{name: _lay_out for name in ("resize_", "as_strided", "as_strided_")},
    "expand": _expand,
    "repeat": _repeat,
    "flip": _flip,
    "roll": _roll,
    "index": _index,
    "index_select": _index_select,
    "index_copy": _index_copy,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    **{name: _channel_shuffle for name in ("channel_shuffle", "native_channel_shuffle")},
    "copy_": _write_rows,
}

FIXED_SIZE_OPS = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "repeat", "channel_shuffle",
    "native_channel_shuffle", "resize_", "as_strided", "as_strided_",
}  # fmt: skip
