"""Training pictures as plain pairs of inputs and classes, for code that takes any loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fpgm.data.registry import Sets


@dataclass(frozen=True)
class Once:
    """The first epoch, the same pictures at every reading, for looking; in folders cropped anew."""

    sets: Sets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.sets.train.epoch(0):
            yield batch.images, batch.labels


class Epochs:
    """A new epoch at every reading, for training; a seed begins at epochs of its own."""

    def __init__(self, sets: Sets, seed: int = 0) -> None:
        self._sets, self._epoch = sets, 100_000 * seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._epoch += 1
        for batch in self._sets.train.epoch(self._epoch):
            yield batch.images, batch.labels
