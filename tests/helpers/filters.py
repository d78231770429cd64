"""Filters to score, and Eq. 7 spelled out to compare with."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def brute(filters: Tensor, distance: str = "l2") -> Tensor:
    """Eq. 7 spelled out in float64, one filter after the other."""
    rows = filters.double()
    if distance == "cosine":
        norms = rows.norm(dim=1, keepdim=True)
        rows = rows / torch.where(norms == 0, 1, norms)
        return torch.stack([(rows - row).square().sum() / 2 for row in rows])
    order = {"l1": 1, "l2": 2}[distance]
    return torch.stack([(rows - row).norm(p=order, dim=1).sum() for row in rows])
