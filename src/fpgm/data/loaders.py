"""Training images as plain pairs of inputs and classes, for code that takes any loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fpgm.data.registry import DataSplits


@dataclass(frozen=True)
class FirstEpoch:
    """The first epoch, the same images every time (those in folders cropped differently)."""

    sets: DataSplits

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.sets.train.epoch(0):
            yield batch.images, batch.labels


class Epochs:
    """A new epoch every time it is iterated, for training; each seed gives different epochs."""

    def __init__(self, sets: DataSplits, seed: int = 0) -> None:
        self._sets, self._epoch = sets, 100_000 * seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._epoch += 1
        for batch in self._sets.train.epoch(self._epoch):
            yield batch.images, batch.labels
