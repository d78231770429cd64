"""How much of a layer is said twice: nearest neighbours, effective rank, and a plane to see it on.

All of it follows from products of filters with each other, in float64: many times faster than
differences and singular values, and exact to some 1e-8 of a filter's length.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

_AT_ONCE = 512
"""Filters whose distances to all others are held at the same time."""
_ROUNDING = 1e-14
"""Share of the largest eigenvalue below which another is nothing but rounding."""


class Gram:
    """Rows of numbers, and their products with each other, which are made once."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.double()
        self.by_rows = len(rows) < rows.shape[1]
        """Whether the products are of rows; else of columns, which are fewer."""

    @cached_property
    def products(self) -> Tensor:
        """Of rows or of columns with each other, whichever are fewer."""
        return self.rows @ self.rows.T if self.by_rows else self.rows.T @ self.rows

    def nearest(self) -> Tensor:
        """Distance of every row to the nearest other one.

        >>> Gram(torch.tensor([[0.0], [1.0], [5.0]])).nearest()
        tensor([1., 1., 4.], dtype=torch.float64)
        """
        squares = self.rows.square().sum(1)
        found = []
        for start in range(0, len(squares), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            products = self.products[part] if self.by_rows else self.rows[part] @ self.rows.T
            squared = squares[part, None] + squares - 2 * products
            own = torch.arange(len(squared))
            squared[own, start + own] = torch.inf
            found.append(squared.min(dim=1).values.clamp(min=0).sqrt())
        return torch.cat(found)

    def effective_rank(self, around: Tensor | None = None) -> float:
        """Exponential of the entropy of the shares that singular values have in their sum.

        As many equally long rows at right angles count as that many; copies of one row count as
        one (Roy and Vetterli, 2007). If the rows were made by taking a point away, it is `around`
        which they are meant.

        >>> round(Gram(torch.eye(4)).effective_rank(), 6)
        4.0
        >>> round(Gram(torch.zeros(4, 3)).effective_rank(around=torch.ones(3)), 6)
        1.0
        """
        products = self.products if around is None else self._moved(around.double())
        values = torch.linalg.eigvalsh(products).clamp(min=0)
        values = values.masked_fill(values < _ROUNDING * values.max(), 0).sqrt()
        total = values.sum()
        if not total > 0:
            return 1.0
        return float(torch.exp(torch.special.entr(values / total).sum()))

    def _moved(self, by: Tensor) -> Tensor:
        """Products of rows that a point is added to."""
        if not self.by_rows:
            moved = self.rows + by
            return moved.T @ moved
        along = self.rows @ by
        return self.products + along + along[:, None] + by @ by

    def on_a_plane(self) -> Tensor:
        """Rows in the two directions in which they are longest: [n, 2].

        >>> Gram(torch.tensor([[2.0, 0.0], [-2.0, 0.0]])).on_a_plane().abs()
        tensor([[2., 0.],
                [2., 0.]], dtype=torch.float64)
        """
        _, vectors = torch.linalg.eigh(self.products)
        top = vectors.flip(1)[:, :2]
        if self.by_rows:  # the products' eigenvectors are the places themselves, at length one
            places = top * (top * (self.products @ top)).sum(0).clamp(min=0).sqrt()
        else:
            places = self.rows @ top
        found: Tensor = torch.nn.functional.pad(places, (0, 2 - places.shape[1]))
        return found
