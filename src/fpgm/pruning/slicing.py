"""Slice tensors according to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fpgm.pruning.plan import Cut

Positions = dict[int, Tensor]
"""Kept positions as tensors, by the id of the tuple: a layer and its norm share one."""


def cut(tensor: Tensor, cuts: Sequence[Cut], positions: Positions | None = None) -> Tensor:
    """Apply cuts to a tensor; dims of size 1 are left unchanged.

    Args:
        tensor: The tensor.
        cuts: What to keep of it.
        positions: Shared by calls for cuts of the same plan, which then convert each tuple once.
    """
    positions = {} if positions is None else positions
    for c in sorted(cuts, key=lambda c: -c.blocks) if len(cuts) > 1 else cuts:
        if tensor.shape[c.dim] == 1 and c.size > 1:
            continue
        keep = positions.get(id(c.keep))
        if keep is None or keep.device != tensor.device:
            keep = torch.from_numpy(np.asarray(c.keep)).to(tensor.device)
            positions[id(c.keep)] = keep
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


@dataclass(frozen=True)
class RemovedSlices:
    """What a cut removes, ready to be zeroed many times: blocks of rows, and indices in each."""

    dim: int
    parts: tuple[tuple[slice, Tensor], ...]

    @classmethod
    def of(cls, c: Cut, tensor: Tensor) -> RemovedSlices:
        """Look up what a cut removes from a tensor of this shape and device.

        As in `cut`, dims of size 1 lose nothing.
        """
        if tensor.shape[c.dim] == 1 and c.size > 1:
            return cls(c.dim, ())
        rows = tensor.shape[0] // c.blocks
        parts = [
            (
                slice(b * rows, (b + 1) * rows) if c.blocks > 1 else slice(None),
                torch.tensor(c.removed(b), dtype=torch.int64, device=tensor.device),
            )
            for b in range(c.blocks)
        ]
        return cls(c.dim, tuple(parts))

    def zero_(self, tensor: Tensor) -> None:
        """Zero these slices of a tensor."""
        if len(self.parts) == 1:  # a view of everything would cost as much as the filling
            tensor.index_fill_(self.dim, self.parts[0][1], 0)
            return
        for rows, positions in self.parts:
            tensor[rows].index_fill_(self.dim, positions, 0)


def by_tensor(cuts: Iterable[Cut]) -> dict[str, list[Cut]]:
    """Group cuts by tensor name."""
    grouped: dict[str, list[Cut]] = {}
    for c in cuts:
        grouped.setdefault(c.tensor, []).append(c)
    return grouped
