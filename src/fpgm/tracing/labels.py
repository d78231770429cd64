"""Label fields: which channel every position of a tensor belongs to.

A field is an int64 tensor with as many dims as the tensor it describes, each of size 1 (the label
does not change along that dim) or full. A tensor may carry several fields: a weight has one along
the axis it writes and one along the axis it reads. Fields never have a single element: a single
channel can never be removed, so it needs no label. This file has the pure arithmetic on fields;
`ops` defines what operators do to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

Fields = tuple[Tensor, ...]

ANY = 0
"""The label of a position that is the same constant whatever its channel (padding, zeros)."""


def axes(field: Tensor) -> list[int]:
    """Return the dims along which the labels change.

    >>> import torch
    >>> axes(torch.tensor([[1], [2]]))
    [0]
    """
    return [dim for dim, size in enumerate(field.shape) if size > 1]


def varies(field: Tensor, dims: Iterable[int]) -> bool:
    """Tell whether the labels change along any of these dims."""
    return any(field.shape[dim] > 1 for dim in dims)


def along(labels: Tensor, ndim: int, dim: int) -> Tensor:
    """Lay a 1-d row of labels along one dim of an `ndim`-dimensional field."""
    shape = [1] * ndim
    shape[dim] = labels.numel()
    return labels.reshape(shape)


def lift(field: Tensor, ndim: int) -> Tensor:
    """Prepend dims of size 1, as broadcasting does."""
    return field.reshape((1,) * (ndim - field.ndim) + tuple(field.shape))


def shrink(field: Tensor) -> Tensor:
    """Reduce every dim along which the labels do not change to size 1.

    >>> import torch
    >>> shrink(torch.tensor([[1, 1], [2, 2]]))
    tensor([[1],
            [2]])
    """
    for dim in axes(field):
        first = field.narrow(dim, 0, 1)
        if bool((field == first).all()):
            field = first
    return field


def fits(field: Tensor, shape: Sequence[int]) -> bool:
    """Tell whether a field can describe a tensor of this shape.

    >>> import torch
    >>> fits(torch.tensor([[1], [2]]), (2, 5)), fits(torch.tensor([[1], [2]]), (3, 5))
    (True, False)
    """
    return field.ndim == len(shape) and all(
        own in (1, size) for own, size in zip(field.shape, shape, strict=True)
    )


def tidy(fields: Iterable[Tensor]) -> Fields:
    """Drop fields that no longer distinguish channels."""
    return tuple(f for f in map(shrink, fields) if f.numel() > 1)


def spread(field: Tensor, shape: Sequence[int], dims: Iterable[int]) -> Tensor:
    """Give the named dims their full size."""
    wanted = set(dims)
    return field.expand([shape[d] if d in wanted else field.shape[d] for d in range(field.ndim)])


def reshape(field: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Reshape a field as `view(after)` does a tensor of shape `before`.

    Only dims that really split or merge are spread out, so a field stays small in batch and space.

    >>> import torch
    >>> row = along(torch.tensor([1, 2]), 4, 1)
    >>> reshape(row, (8, 2, 1, 3), (8, 6))
    tensor([[1, 1, 1, 2, 2, 2]])
    """
    sizes: list[int] = []
    pieces: list[int] = []
    for ins, outs in dim_groups(before, after):
        if varies(field, ins):
            pieces += [before[d] for d in ins]
            sizes += [after[d] for d in outs]
        else:
            pieces += [1] * len(ins)
            sizes += [1] * len(outs)
    return field.expand(pieces).reshape(sizes)


def dim_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Find the smallest runs of dims whose products agree: each reshapes on its own."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [], []
        left = right = 1
        if i < len(before):
            left, ins = before[i], [i]
            i += 1
        if j < len(after):
            right, outs = after[j], [j]
            j += 1
        while left != right:
            if (left < right and i < len(before)) or j >= len(after):
                left *= before[i]
                ins.append(i)
                i += 1
            else:
                right *= after[j]
                outs.append(j)
                j += 1
        groups.append((ins, outs))
    return groups


def varying_dim(field: Tensor, dims: Sequence[int]) -> int:
    """Pick, of the dims that one channel axis was split into, the one that changes size.

    Code such as `view(b, groups, c // groups, h, w)` fixes the small number and derives the large
    one. This is a guess, and a dry run of the compact model checks it.
    """
    return max(dims, key=lambda d: (field.shape[d], d))


def remaining_sizes(stays: Tensor) -> list[tuple[int, ...]]:
    """List possible sizes of the varying dims after removal, by the dim that shrinks.

    Along that dim all blocks keep equally many, though not the same ones; along others, whole rows
    are removed.

    >>> import torch
    >>> remaining_sizes(torch.tensor([[True, False, True], [False, True, True]]))
    [(2, 2)]
    """
    used = axes(stays)
    options = []
    for main in used:
        counts = stays.sum(main)
        alive = counts[counts > 0]
        if not len(alive) or bool((alive != alive[0]).any()):
            continue
        sizes = [
            int(alive[0])
            if d == main
            else int(stays.any([o for o in range(stays.ndim) if o != d]).sum())
            for d in used
        ]
        if math.prod(sizes) == int(stays.sum()):
            options.append(tuple(sizes))
    return options


def kept_numel(fields: Fields, shape: Sequence[int], kept: Tensor | None) -> int:
    """Count the elements of a tensor that remain for `kept` labels (None: all).

    >>> import torch
    >>> kept_numel((torch.tensor([[1], [2]]),), (2, 5), torch.tensor([True, True, False]))
    5
    """
    total = math.prod(shape)
    if kept is None or not fields:
        return total
    if len(fields) == 1:
        return total // fields[0].numel() * count_kept(fields[0], kept)
    for mask in independent(fields, kept):
        total = total // mask.numel() * int(np.count_nonzero(mask.numpy()))
    return total


def count_kept(field: Tensor, kept: Tensor) -> int:
    """Count the positions of a field whose labels are kept; several times faster than in torch.

    >>> import torch
    >>> count_kept(torch.tensor([2, 0, 2]), torch.tensor([True, True, False]))
    1
    """
    return int(np.count_nonzero(kept.numpy()[field.numpy()]))


def independent(fields: Fields, kept: Tensor) -> list[Tensor]:
    """Return masks along disjoint axes; fields that share an axis are combined into one."""
    masks: list[Tensor] = []
    for field in fields:
        mask = kept[field]
        for other in [m for m in masks if varies(m, axes(mask))]:
            masks = [m for m in masks if m is not other]
            mask = mask & other
        masks.append(mask)
    return masks
