"""Cutting tensors as a plan says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fpgm.plan import Cut


def cut(tensor: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """Keep what the cuts say; a tensor of size 1 along a dim has nothing to lose there."""
    for c in sorted(cuts, key=lambda c: -c.blocks):
        if tensor.shape[c.dim] == 1 and c.size > 1:
            continue
        keep = _positions(c.keep).to(tensor.device)
        if c.blocks == 1:
            tensor = tensor.index_select(c.dim, keep)
        else:
            rows = tensor.shape[0] // c.blocks
            parts = [
                tensor[b * rows : (b + 1) * rows].index_select(c.dim, share)
                for b, share in enumerate(keep.reshape(c.blocks, -1))
            ]
            tensor = torch.cat(parts)
    return tensor


@lru_cache(maxsize=256)
def _positions(keep: tuple[int, ...]) -> Tensor:
    """A layer, its norm and its readers keep the same: the second asks for what the first made."""
    return torch.from_numpy(np.asarray(keep))


def by_tensor(cuts: Iterable[Cut]) -> dict[str, list[Cut]]:
    """Cuts of each tensor."""
    grouped: dict[str, list[Cut]] = {}
    for c in cuts:
        grouped.setdefault(c.tensor, []).append(c)
    return grouped
