"""Data movement: the same operator, applied to the label field, is the rule.

Fields are size 1 where labels do not change, so every rule first asks whether the moved dims carry
labels at all. Where sizes may be constants of the user's code (split, slice, view, pad), equal
shares per block are assumed and the tracer is told that the result is `risky`, so that replaying
the compact model checks it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fpgm import labels as lb
from fpgm.rules.pointwise import meet

if TYPE_CHECKING:
    from fpgm.tracer import Tracer

_MOST_BLOCKS = 8
"""Unequal pieces are balanced in blocks of their common divisor, but only in so many."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _as_is(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    tracer.set(out, tracer.fields(args[0]))
    tracer.passed(args[0], out)


def _view(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = args[0]
    fields = []
    for field in tracer.fields(x):
        moved = lb.shrink(lb.reshape(field, tuple(x.shape), tuple(out.shape)))
        split = lb.axes(moved)
        if len(split) > len(lb.axes(field)):
            _split_axis(tracer, moved, split)
        fields.append(moved)
    tracer.set(out, fields)


def _split_axis(tracer: Tracer, field: Tensor, dims: list[int]) -> None:
    """One axis became several: inner rows go together, outer blocks keep equal shares."""
    main = lb.varying_dim(field, dims)
    tracer.tie(field, [d for d in dims if d > main])
    outer = math.prod(field.shape[d] for d in dims if d < main)
    rows = field
    for d in dims:
        if d > main:
            rows = rows.narrow(d, 0, 1)
    tracer.balance(rows.reshape(outer, -1))


def _permute(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.set(out, [f.permute(args[1]) for f in tracer.fields(args[0])])


def _transpose(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    a, b = args[1:3] if len(args) > 2 else (0, -1)
    tracer.set(out, [f.transpose(a, b) if f.ndim > 1 else f for f in tracer.fields(args[0])])


def _unsqueeze(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.set(out, [f.unsqueeze(args[1]) for f in tracer.fields(args[0])])


def _squeeze(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = args[0]
    tracer.set(out, [lb.reshape(f, tuple(x.shape), tuple(out.shape)) for f in tracer.fields(x)])


def _expand(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.set(out, [lb.lift(f, out.ndim) for f in tracer.fields(args[0])])


def _repeat(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    times = args[1]
    fields = []
    for f in tracer.fields(args[0]):
        f = lb.lift(f, out.ndim)
        fields.append(
            f.repeat([n if size > 1 else 1 for n, size in zip(times, f.shape, strict=True)])
        )
    tracer.set(out, fields)


def _slice(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
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
        fields.append(f.narrow(dim, start, end - start)[_every(dim, step)])
        _freeze_single(tracer, f, fields[-1])
    tracer.set(out, fields)


def _bound(value: int | None, size: int, default: int) -> int:
    if value is None:
        return default
    return max(0, min(size, value + size if value < 0 else value))


def _every(dim: int, step: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(None, None, step))


def _tie_steps(tracer: Tracer, field: Tensor, dim: int, step: int) -> None:
    size = field.shape[dim]
    if size % step:
        tracer.freeze([field], f"every {step}nd channel is taken of a number it does not divide")
        return
    rows = field.movedim(dim, 0).reshape(size // step, step, -1)
    tracer.tie(rows, [1])


def _balance_pieces(tracer: Tracer, field: Tensor, dim: int, sizes: list[int]) -> None:
    """Pieces of one axis: equal shares in blocks of their common divisor, if those are few."""
    total = field.shape[dim]
    block = math.gcd(*sizes)
    if block and total // block <= max(_MOST_BLOCKS, len(sizes)):
        rows = field.movedim(dim, 0).reshape(total // block, -1)
        tracer.balance(rows, whole=False)


def _select(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    dim, index = args[1], args[2]
    fields = []
    for f in tracer.fields(args[0]):
        picked = f.select(dim, index if f.shape[dim] > 1 else 0)
        _freeze_single(tracer, f, picked)
        fields.append(picked)
    tracer.set(out, fields)


def _freeze_single(tracer: Tracer, field: Tensor, piece: Tensor) -> None:
    """One channel picked by position: removing any before it would make it another one."""
    if piece.numel() == 1 and field.numel() > 1:
        tracer.freeze([field], "one channel is picked by position")


def _unbind(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for index, piece in enumerate(out):
        _select(tracer, name, (args[0], dim, index), {}, piece)


def _split(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
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
            tracer.sized(pieces)
            for piece in pieces:
                _freeze_single(tracer, f, piece)
        for own, piece in zip(fields, pieces, strict=True):
            own.append(piece)
    for piece, own in zip(out, fields, strict=True):
        tracer.set(piece, own)


def _cat(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    parts = [x for x in args[0] if not (x.ndim == 1 and x.numel() == 0 and out.ndim > 1)]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    _join(tracer, parts, [tracer.fields(x) for x in parts], dim, out)


def _stack(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    own = [[f.unsqueeze(dim) for f in tracer.fields(x)] for x in args[0]]
    if all(len(fields) == 1 for fields in own):
        shape = torch.broadcast_shapes(*(fields[0].shape for fields in own))
        tracer.set(out, [torch.cat([fields[0].expand(shape) for fields in own], dim)])
        return
    parts = [x.unsqueeze(dim) for x in args[0]]
    _join(tracer, parts, own, dim, out)


def _join(tracer: Tracer, parts: Any, own: Any, dim: int, out: Tensor) -> None:
    """Concatenation: labels lie end to end along `dim` and meet along every other axis."""
    across: list[Tensor] = []
    pieces: list[Tensor | None] = []
    for fields in own:
        lying = [f for f in fields if f.shape[dim] > 1]
        if len(lying) > 1:
            tracer.freeze(lying, "a weight is concatenated along two labelled axes")
        pieces.append(lying[0] if lying else None)
    for fields in own:
        for f in fields:
            if f.shape[dim] > 1:
                continue
            match = next((g for g in across if lb.varies(g, lb.axes(f))), None)
            if match is None:
                across.append(f)
            else:
                tracer.relate(match, f)
    for part, fields in zip(parts, own, strict=True):
        labelled = {d for f in fields for d in lb.axes(f)}
        for g in across:
            if any(part.shape[d] > 1 and d not in labelled for d in lb.axes(g)):
                tracer.freeze([g], "they are concatenated with a tensor of fixed size")
    result = list(across)
    if any(piece is not None for piece in pieces):
        result.append(_end_to_end(tracer, parts, pieces, dim))
    tracer.set(out, result)


def _end_to_end(tracer: Tracer, parts: Any, pieces: list[Tensor | None], dim: int) -> Tensor:
    filled = []
    for number, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        if piece is None:
            piece = lb.along(tracer.fixed(number, part.shape[dim]), part.ndim, dim)
        filled.append(piece)
    tracer.joined()
    shape = list(torch.broadcast_shapes(*(p.select(dim, 0).shape for p in filled)))
    return torch.cat([p.expand([*shape[:dim], p.shape[dim], *shape[dim:]]) for p in filled], dim)


def _flip(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    tracer.set(out, [f.flip(args[1]) for f in tracer.fields(args[0])])


def _roll(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    fields = tracer.fields(args[0])
    dims = [d % out.ndim for d in (args[2] if len(args) > 2 else kwargs.get("dims", []))]
    moved = [f for f in fields if lb.varies(f, dims or range(f.ndim))]
    tracer.freeze(moved, "channels are rolled by a fixed number")
    tracer.set(out, [f for f in fields if not any(f is m for m in moved)])


def _pad(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
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
                tracer.freeze([f], "channels are cropped by a negative pad")
                continue
            f = _padded(tracer, f, dim, before, after)
            if value:
                # What padding adds must be all alike, or the replay could take one for another.
                tracer.freeze([f], "channels are padded with something other than zero")
        fields.append(f)
    tracer.set(out, [f for f in fields if _fits(f, out)])


def _padded(tracer: Tracer, f: Tensor, dim: int, before: int, after: int) -> Tensor:
    added = [tracer.fresh(before), tracer.fresh(after)]
    tracer.padded(added)
    if before == after:  # one number in the code often serves both ends
        tracer.balance(torch.stack(added))

    def laid(labels: Tensor) -> Tensor:
        shape = list(f.shape)
        shape[dim] = labels.numel()
        return lb.along(labels, f.ndim, dim).expand(shape)

    return torch.cat([laid(added[0]), f, laid(added[1])], dim)


def _fits(field: Tensor, out: Tensor) -> bool:
    return all(a in (1, b) for a, b in zip(field.shape, out.shape, strict=True))


def _index(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Fancy indexing: fine beside the labelled axes, frozen along them: the positions are fixed."""
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


def _index_select(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
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
    tracer.picked(x, out)


def _index_copy(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    base, dim, index, source = args[0], args[1] % args[0].ndim, args[2], args[3]
    tracer.freeze(tracer.fields(base), "some of its channels are written over")
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


def _glu(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """One half gates the other: the k-th channels of both go together."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else -1) % x.ndim
    fields = []
    for f in tracer.fields(x):
        if f.shape[dim] > 1:
            f, gate = f.chunk(2, dim)
            tracer.relate(f, gate)
        fields.append(f)
    tracer.set(out, fields)


def _pixel_shuffle(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, factor = args[0], args[1]
    channel = x.ndim - 3
    fields = []
    for f in tracer.fields(x):
        if lb.varies(f, (x.ndim - 2, x.ndim - 1)):
            tracer.freeze([f], "labels along space are shuffled")
            continue
        rows = f.movedim(channel, 0).reshape(f.shape[channel] // factor**2, factor**2, -1)
        tracer.tie(rows, [1])
        fields.append(f[_every(channel, factor**2)])
    tracer.set(out, fields)


def _pixel_unshuffle(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, factor = args[0], args[1]
    fields = tracer.fields(x)
    if any(lb.varies(f, (x.ndim - 2, x.ndim - 1)) for f in fields):
        tracer.freeze(fields, "labels along space are shuffled")
        return
    tracer.set(out, [f.repeat_interleave(factor**2, x.ndim - 3) for f in fields])


def _channel_shuffle(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, groups = args[0], args[1]
    fields = []
    for f in tracer.fields(x):
        if f.shape[1] > 1:
            rows = f.reshape(f.shape[0], groups, -1, *f.shape[2:])
            tracer.balance(rows[0].reshape(groups, -1))
            f = rows.transpose(1, 2).reshape(f.shape)
        fields.append(f)
    tracer.set(out, fields)


def _factory(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """A tensor of one constant: any of its axes may turn out to be a channel axis."""
    if out.numel() > 1 and out.ndim > 1:
        tracer.set(
            out,
            [
                lb.along(tracer.fresh(size), out.ndim, dim)
                for dim, size in enumerate(out.shape)
                if size > 1
            ],
        )


def _nothing(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Sizes, random numbers, index arithmetic: no labels come out and none are harmed."""


def _write_rows(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """`copy_` into a view: both sides meet, and the base already carries the same labels."""
    target, source = args[0], args[1]
    if source.ndim:
        tracer.set(out, meet(tracer, [target, source], tuple(out.shape)))


RULES: dict[str, Any] = {
    **{
        name: _as_is
        for name in (
            "alias",
            "clone",
            "detach",
            "contiguous",
            "_to_copy",
            "lift_fresh",
            "lift",
            "lift_fresh_copy",
            "positive",
            "_conj",
            "resolve_conj",
            "resolve_neg",
            "view_as",
        )
    },
    **{name: _view for name in ("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")},
    "permute": _permute,
    **{name: _transpose for name in ("t", "transpose")},
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "repeat": _repeat,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **{
        name: _split
        for name in ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
    },
    "cat": _cat,
    "stack": _stack,
    "flip": _flip,
    "roll": _roll,
    "constant_pad_nd": _pad,
    "index": _index,
    "index_select": _index_select,
    "index_copy": _index_copy,
    "glu": _glu,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    **{name: _channel_shuffle for name in ("channel_shuffle", "native_channel_shuffle")},
    **{
        name: _factory
        for name in (
            "zeros",
            "ones",
            "full",
            "empty",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
        )
    },
    **{
        name: _nothing
        for name in (
            "arange",
            "linspace",
            "scalar_tensor",
            "rand",
            "randn",
            "randint",
            "randperm",
            "eye",
            "_local_scalar_dense",
            "as_strided_",
            "is_same_size",
            "sym_size",
            "equal",
            "tril_indices",
            "triu_indices",
            "empty_strided",
            "_assert_async",
            "_assert_tensor_metadata",
        )
    },
    "copy_": _write_rows,
}

RISKY = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "slice", "split",
    "split_with_sizes", "constant_pad_nd", "channel_shuffle", "native_channel_shuffle", "zeros",
    "ones", "full", "empty", "new_empty", "new_zeros", "new_ones", "new_full", "repeat",
}  # fmt: skip
"""Operators whose sizes may be constants of the user's code."""
