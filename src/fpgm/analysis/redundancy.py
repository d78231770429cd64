"""How much of a layer is said twice: nearest neighbours, effective rank, and a plane to see it on.

All of it follows from products of filters with each other, in float64: many times faster than
differences and singular values, and exact to some 1e-8 of a filter's length.
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 512
"""Filters whose distances to all others are held at the same time."""


def nearest(rows: Tensor) -> Tensor:
    """Distance of every row to the nearest other one.

    >>> nearest(torch.tensor([[0.0], [1.0], [5.0]]))
    tensor([1., 1., 4.], dtype=torch.float64)
    """
    centred = rows.double() - rows.double().mean(0)
    squares = centred.square().sum(1)
    found = []
    for start in range(0, len(rows), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        squared = squares[part, None] + squares - 2 * centred[part] @ centred.T
        own = torch.arange(len(squared))
        squared[own, start + own] = torch.inf
        found.append(squared.min(dim=1).values.clamp(min=0).sqrt())
    return torch.cat(found)


def effective_rank(rows: Tensor) -> float:
    """Exponential of the entropy of the shares that singular values have in their sum.

    As many equally long rows at right angles count as that many; copies of one row count as one
    (Roy and Vetterli, 2007).

    >>> round(effective_rank(torch.eye(4)), 6), round(effective_rank(torch.ones(4, 3)), 6)
    (4.0, 1.0)
    """
    wide = rows.double()
    values = torch.linalg.eigvalsh(_smaller_gram(wide)).clamp(min=0)
    values = values.masked_fill(values < _ROUNDING * values.max(), 0).sqrt()
    total = values.sum()
    if not total > 0:
        return 1.0
    return float(torch.exp(torch.special.entr(values / total).sum()))


_ROUNDING = 1e-14
"""Share of the largest eigenvalue below which another is nothing but rounding."""


def on_a_plane(rows: Tensor) -> Tensor:
    """Rows in the two directions in which they are longest: [n, 2].

    >>> on_a_plane(torch.tensor([[2.0, 0.0], [-2.0, 0.0]])).abs()
    tensor([[2., 0.],
            [2., 0.]], dtype=torch.float64)
    """
    wide = rows.double()
    gram = _smaller_gram(wide)
    _, vectors = torch.linalg.eigh(gram)
    top = vectors.flip(1)[:, :2]
    if len(gram) == wide.shape[1]:
        places = wide @ top
    else:  # the products' eigenvectors are the places themselves, at length one
        places = top * (top * (gram @ top)).sum(0).clamp(min=0).sqrt()
    found: Tensor = torch.nn.functional.pad(places, (0, 2 - places.shape[1]))
    return found


def _smaller_gram(rows: Tensor) -> Tensor:
    """Products of rows or of columns with each other, whichever are fewer."""
    return rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
