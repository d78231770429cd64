"""What every source of batches gives, and how processes share a batch among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One process's pictures and labels, and how many all processes have together."""

    images: Tensor
    labels: Tensor
    total: int


class Batches(Protocol):
    """A data set cut into batches, anew every epoch."""

    def __len__(self) -> int: ...

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of one epoch; the same number gives the same batches."""


@dataclass(frozen=True)
class Share:
    """Which of several processes this is.

    >>> Share(1, 2).of(range(10, 15))
    [11, 13]
    """

    rank: int = 0
    world: int = 1

    def of(self, positions: Sequence[int]) -> list[int]:
        """This process's part of a batch; all parts are non-empty if the batch is large enough."""
        return list(positions[self.rank :: self.world])


ALONE = Share()
"""One process has everything."""


def seeded(seed: int, epoch: int) -> torch.Generator:
    """Random numbers of one epoch, whatever was drawn before it."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
