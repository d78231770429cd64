"""Slices, splits, concatenations and padding of an axis.

Sizes may be constants of the user's code, so pieces of one axis are assumed to keep equal
fractions, and most are `FIXED_SIZE_OPS`: a dry run of the compact model checks them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule

_MAX_BLOCKS = 8
"""Unequal pieces are balanced in blocks of their common divisor, up to this number."""


def _slice(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.ndim
    start = _bound(args[2] if len(args) > 2 else kwargs.get("start"), x.shape[dim], 0)
    end = _bound(args[3] if len(args) > 3 else kwargs.get("end"), x.shape[dim], x.shape[dim])
    step = args[4] if len(args) > 4 else kwargs.get("step", 1)
    fields = []
    for f in tracer.fields(x):
        if f.shape[dim] == 1:
            fields.append(f)
            continue
        if step > 1:
            _tie_steps(tracer, f, dim, step)
        elif end - start < x.shape[dim]:
            _balance_pieces(tracer, f, dim, [start, end - start, x.shape[dim] - end])
        fields.append(f.narrow(dim, start, end - start)[strided_index(dim, step)])
        _freeze_single(tracer, f, fields[-1])
    tracer.set(out, fields)


def _select(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    dim, index = args[1], args[2]
    fields = []
    for f in tracer.fields(args[0]):
        picked = f.select(dim, index if f.shape[dim] > 1 else 0)
        _freeze_single(tracer, f, picked)
        fields.append(picked)
    tracer.set(out, fields)


def _unbind(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for index, piece in enumerate(out):
        _select(tracer, name, (args[0], dim, index), {}, piece)


def _split(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    x = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.ndim
    sizes = [piece.shape[dim] for piece in out]
    fields: list[list[Tensor]] = [[] for _ in out]
    for f in tracer.fields(x):
        if f.shape[dim] == 1:
            pieces: Any = [f] * len(out)
        else:
            _balance_pieces(tracer, f, dim, sizes)
            pieces = f.split(sizes, dim)
            tracer.note_piece_sizes(pieces)
            for piece in pieces:
                _freeze_single(tracer, f, piece)
        for piece_fields, piece in zip(fields, pieces, strict=True):
            piece_fields.append(piece)
    for piece, piece_fields in zip(out, fields, strict=True):
        tracer.set(piece, piece_fields)


def _cat(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    parts = [x for x in args[0] if not (x.ndim == 1 and x.numel() == 0 and out.ndim > 1)]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    _join(tracer, parts, [tracer.fields(x) for x in parts], dim, out)


def _stack(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    part_fields = [[f.unsqueeze(dim) for f in tracer.fields(x)] for x in args[0]]
    axes = [[lb.axes(f) for f in fields] for fields in part_fields]
    if axes[0] and len(axes[0]) == len(axes[0][0]) == 1 and all(a == axes[0] for a in axes):
        rows = [fields[0] for fields in part_fields]
        if len({row.shape for row in rows}) == 1:
            tracer.set(out, [torch.cat(rows, dim)])
            labels = torch.stack([row.reshape(-1) for row in rows])
            tracer.balance(labels, whole=False)
            tracer.note_stack(labels)
            return
    parts = [x.unsqueeze(dim) for x in args[0]]
    _join(tracer, parts, part_fields, dim, out)


def _pad(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, pads = args[0], args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    fields = []
    for f in tracer.fields(x):
        for i in range(0, len(pads), 2):
            dim = x.ndim - 1 - i // 2
            before, after = pads[i], pads[i + 1]
            if f.shape[dim] == 1 or (before == 0 and after == 0):
                continue
            if before < 0 or after < 0:
                tracer.freeze([f], "channels are cropped by negative padding")
                continue
            f = _pad_field(tracer, f, dim, before, after)
            if value:
                # All padding gets the same label, or the dry run could confuse its channels.
                tracer.freeze([f], "channels are padded with something other than zero")
        fields.append(f)
    tracer.set(out, [f for f in fields if _fits(f, out)])


def _glu(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Tie the k-th channels of both halves: one gates the other."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else -1) % x.ndim
    fields = []
    for f in tracer.fields(x):
        if f.shape[dim] > 1:
            f, gate = f.chunk(2, dim)
            tracer.relate(f, gate)
        fields.append(f)
    tracer.set(out, fields)


def strided_index(dim: int, step: int) -> tuple[slice, ...]:
    """Return an index of every `step`-th position along a dim."""
    return (*[slice(None)] * dim, slice(None, None, step))


def _bound(value: int | None, size: int, default: int) -> int:
    if value is None:
        return default
    return max(0, min(size, value + size if value < 0 else value))


def _tie_steps(tracer: LabelTracer, field: Tensor, dim: int, step: int) -> None:
    size = field.shape[dim]
    if not tracer.may_assume_sizes:
        return
    if size % step:
        tracer.freeze([field], f"a slice with step {step} does not divide the channels evenly")
        return
    rows = field.movedim(dim, 0).reshape(size // step, step, -1)
    tracer.tie(rows, [1])


def _balance_pieces(tracer: LabelTracer, field: Tensor, dim: int, sizes: list[int]) -> None:
    """Balance pieces of one axis in blocks of their common divisor, if those are few."""
    total = field.shape[dim]
    block = math.gcd(*sizes)
    if block and total // block <= max(_MAX_BLOCKS, len(sizes)):
        rows = field.movedim(dim, 0).reshape(total // block, -1)
        tracer.balance(rows, whole=False)


def _freeze_single(tracer: LabelTracer, field: Tensor, piece: Tensor) -> None:
    """Freeze an axis of which one channel is picked by position."""
    if piece.numel() == 1 and field.numel() > 1:
        tracer.freeze([field], "one channel is picked by position")


def _join(tracer: LabelTracer, parts: Any, part_fields: Any, dim: int, out: Tensor) -> None:
    """Concatenate labels along `dim`; relate them along every other axis."""
    across: list[Tensor] = []
    pieces: list[Tensor | None] = []
    for fields in part_fields:
        lying = [f for f in fields if f.shape[dim] > 1]
        if len(lying) > 1:
            tracer.freeze(lying, "a weight is concatenated along two labeled axes")
        pieces.append(lying[0] if lying else None)
    for fields in part_fields:
        for f in fields:
            if f.shape[dim] > 1:
                continue
            match = next((g for g in across if lb.varies(g, lb.axes(f))), None)
            if match is None:
                across.append(f)
            else:
                tracer.relate(match, f)
                tracer.note_sum_term(match, f, parts)
    fixed = set()
    for part, fields in zip(parts, part_fields, strict=True):
        labelled = {d for f in fields for d in lb.axes(f)}
        for g in across:
            if any(part.shape[d] > 1 and d not in labelled for d in lb.axes(g)):
                tracer.freeze([g], "they are concatenated with a tensor of fixed size")
                fixed.add(id(g))
    result = [g for g in across if id(g) not in fixed]
    if any(piece is not None for piece in pieces):
        result.append(_end_to_end(tracer, parts, pieces, dim))
    tracer.set(out, result)


def _end_to_end(tracer: LabelTracer, parts: Any, pieces: list[Tensor | None], dim: int) -> Tensor:
    filled = []
    for number, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        if piece is None:
            piece = lb.along(tracer.fixed_labels(number, part.shape[dim]), part.ndim, dim)
        filled.append(piece)
    tracer.end_concat()
    shape = list(torch.broadcast_shapes(*(p.select(dim, 0).shape for p in filled)))
    return torch.cat([p.expand([*shape[:dim], p.shape[dim], *shape[dim:]]) for p in filled], dim)


def _pad_field(tracer: LabelTracer, f: Tensor, dim: int, before: int, after: int) -> Tensor:
    added = [tracer.new_labels(before), tracer.new_labels(after)]
    tracer.note_padding(added)
    if before == after:  # one number in the code often serves both ends
        tracer.balance(torch.stack(added))

    def expand_row(labels: Tensor) -> Tensor:
        shape = list(f.shape)
        shape[dim] = labels.numel()
        return lb.along(labels, f.ndim, dim).expand(shape)

    return torch.cat([expand_row(added[0]), f, expand_row(added[1])], dim)


def _fits(field: Tensor, out: Tensor) -> bool:
    return all(a in (1, b) for a, b in zip(field.shape, out.shape, strict=True))


_SPLITS = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")

RULES: dict[str, Rule] = {
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **{name: _split for name in _SPLITS},
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "glu": _glu,
}

FIXED_SIZE_OPS = {"slice", "stack", "constant_pad_nd", *_SPLITS}


def sized_dims(name: str, args: Args) -> list[int] | None:
    """List the dims whose sizes an operator is given; None if that may be any.

    >>> sized_dims("constant_pad_nd", (torch.zeros(1, 8, 4, 4), [0, 1, 2, 2]))
    [3, 2]
    """
    if name == "slice":
        return [(args[1] if len(args) > 1 else 0) % args[0].ndim]
    if name == "constant_pad_nd":
        return [args[0].ndim - 1 - i for i in range(len(args[1]) // 2) if any(args[1][2 * i :][:2])]
    return None
