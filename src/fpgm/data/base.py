"""The interface of data sets: batches, and how processes share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One process's images and labels, and the number of images in all processes."""

    images: Tensor
    labels: Tensor
    total: int


class Batches(Protocol):
    """A data set in batches, shuffled again every epoch."""

    def __len__(self) -> int: ...

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batches of one epoch; the same number gives the same batches."""


@dataclass(frozen=True)
class ProcessShare:
    """Which of several processes this is.

    >>> ProcessShare(1, 2).take(range(10, 15))
    [11, 13]
    """

    rank: int = 0
    world: int = 1

    def take(self, positions: Sequence[int]) -> list[int]:
        """Return this process's part of a batch; empty only if the batch is too small for all."""
        return list(positions[self.rank :: self.world])


SINGLE_PROCESS = ProcessShare()
"""The part of a single process: everything."""


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a generator for one epoch, independent of earlier epochs."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
