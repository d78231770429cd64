"""Redundancy of a layer's filters: nearest neighbors, effective rank, two-dimensional projection.

All are computed from the Gram matrix of the filters in float64. This is many times faster than
pairwise differences and an SVD, and exact to about 1e-8 of a filter's norm.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

_CHUNK = 512
"""Rows whose distances to all others are in memory at the same time."""
_RELATIVE_EPS = 1e-14
"""Eigenvalues smaller than this fraction of the largest are rounding errors."""


class GramMatrix:
    """A matrix and its Gram matrix, which is computed once.

    Args:
        rows: [n, features], one filter per row.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.double()
        self.by_rows = len(rows) < rows.shape[1]
        """Whether `products` is the Gram matrix of the rows, else of the columns."""

    @cached_property
    def products(self) -> Tensor:
        """Gram matrix of the rows or of the columns, whichever are fewer."""
        return self.rows @ self.rows.T if self.by_rows else self.rows.T @ self.rows

    def nearest_distances(self) -> Tensor:
        """Compute the distance of every row to its nearest neighbor.

        >>> GramMatrix(torch.tensor([[0.0], [1.0], [5.0]])).nearest_distances()
        tensor([1., 1., 4.], dtype=torch.float64)
        """
        squares = self.rows.square().sum(1)
        distances = []
        for start in range(0, len(squares), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            products = self.products[chunk] if self.by_rows else self.rows[chunk] @ self.rows.T
            squared = squares[chunk, None] + squares - 2 * products
            diagonal = torch.arange(len(squared))
            squared[diagonal, start + diagonal] = torch.inf
            distances.append(squared.min(dim=1).values.clamp(min=0).sqrt())
        return torch.cat(distances)

    def effective_rank(self, around: Tensor | None = None) -> float:
        """Compute the exponential of the entropy of the normalized singular values.

        It is n for n orthogonal rows of equal norm, and 1 for copies of one row (Roy and Vetterli,
        2007).

        Args:
            around: a point that was subtracted from the rows; it is added again for the rank.

        >>> round(GramMatrix(torch.eye(4)).effective_rank(), 6)
        4.0
        >>> round(GramMatrix(torch.zeros(4, 3)).effective_rank(around=torch.ones(3)), 6)
        1.0
        """
        products = self.products if around is None else self._shifted_products(around.double())
        values = torch.linalg.eigvalsh(products).clamp(min=0)
        values = values.masked_fill(values < _RELATIVE_EPS * values.max(), 0).sqrt()
        total = values.sum()
        if not total > 0:
            return 1.0
        return float(torch.exp(torch.special.entr(values / total).sum()))

    def _shifted_products(self, offset: Tensor) -> Tensor:
        """Compute the Gram matrix after a point is added to every row."""
        if not self.by_rows:
            shifted = self.rows + offset
            return shifted.T @ shifted
        along = self.rows @ offset
        return self.products + along + along[:, None] + offset @ offset

    def principal_coordinates(self) -> Tensor:
        """Project the rows on the two directions of largest variance: [n, 2].

        >>> GramMatrix(torch.tensor([[2.0, 0.0], [-2.0, 0.0]])).principal_coordinates().abs()
        tensor([[2., 0.],
                [2., 0.]], dtype=torch.float64)
        """
        _, vectors = torch.linalg.eigh(self.products)
        top = vectors.flip(1)[:, :2]
        if self.by_rows:  # the eigenvectors are the coordinates, normalized
            coordinates = top * (top * (self.products @ top)).sum(0).clamp(min=0).sqrt()
        else:
            coordinates = self.rows @ top
        padded: Tensor = torch.nn.functional.pad(coordinates, (0, 2 - coordinates.shape[1]))
        return padded
