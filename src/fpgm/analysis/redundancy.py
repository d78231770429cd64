"""How much of a layer is said twice: nearest neighbours and effective rank."""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 512
"""Filters whose distances to all others are held at the same time."""


def nearest(rows: Tensor) -> Tensor:
    """Distance of every row to the nearest other one.

    >>> nearest(torch.tensor([[0.0], [1.0], [5.0]]))
    tensor([1., 1., 4.])
    """
    found = []
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        distances = torch.cdist(part, rows, compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(len(part))
        distances[own, start + own] = torch.inf
        found.append(distances.min(dim=1).values)
    return torch.cat(found)


def effective_rank(rows: Tensor) -> float:
    """Exponential of the entropy of the shares that singular values have in their sum.

    As many equally long rows at right angles count as that many; copies of one row count as one
    (Roy and Vetterli, 2007).

    >>> round(effective_rank(torch.eye(4)), 6), round(effective_rank(torch.ones(4, 3)), 6)
    (4.0, 1.0)
    """
    values = torch.linalg.svdvals(rows.double())
    total = values.sum()
    if not total > 0:
        return 1.0
    shares = values / total
    return float(torch.exp(torch.special.entr(shares).sum()))
