"""Whole data sets in memory as bytes, and batches of them augmented all at once.

What a batch holds depends on the seed, the epoch and the position alone: not on the number of
processes that share it, nor on whether training was interrupted before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fpgm.data.base import ALONE, Batch, Share, seeded


@dataclass(frozen=True)
class Images:
    """Pictures as uint8 [N, C, H, W] and their labels [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> Images:
        """The first so many."""
        return Images(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class Look:
    """How pictures are shown to a network: mean and spread per channel, in 0…1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, images: Tensor) -> Tensor:
        """Bytes to normalised floats.

        >>> Look((0.5,), (0.25,)).apply(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
        tensor([[[[-2.,  2.]]]])
        """
        shape = (1, -1, 1, 1)
        scale = torch.tensor(self.std, device=images.device).reshape(shape) * 255
        shift = torch.tensor(self.mean, device=images.device).reshape(shape) * 255
        return (images.float() - shift) / scale


@dataclass(frozen=True)
class Augment:
    """Random crops after padding with black, and mirroring."""

    crop: int = 0
    flip: bool = False


class MemoryBatches:
    """Batches of a data set in memory; augmentation works on bytes, on the device."""

    def __init__(
        self,
        data: Images,
        batch: int,
        look: Look,
        *,
        augment: Augment | None = None,
        seed: int | None = None,
        share: Share = ALONE,
        device: torch.device | str = "cpu",
    ) -> None:
        """Shuffled by `seed`, in order without."""
        self.data = Images(data.images.to(device), data.labels.to(device))
        self.batch, self.look, self.share = batch, look, share
        self.augment = augment or Augment()
        self.seed = seed

    def __len__(self) -> int:
        return math.ceil(len(self.data) / self.batch)

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of one epoch, this process's share of each."""
        count, crop = len(self.data), self.augment.crop
        device = self.data.labels.device
        order = torch.arange(count)
        shifts, mirror = torch.full((count, 2), crop), torch.zeros(count, dtype=torch.bool)
        if self.seed is not None:
            random = seeded(self.seed, number)
            order = torch.randperm(count, generator=random)
            shifts = torch.randint(0, 2 * crop + 1, (count, 2), generator=random)
            if self.augment.flip:
                mirror = torch.rand(count, generator=random) < 0.5
        for start in range(0, count, self.batch):
            whole = range(start, min(start + self.batch, count))
            own = torch.tensor(self.share.of(whole), dtype=torch.int64)
            index = order[own].to(device)
            images = self.data.images[index]
            if crop:
                images = _crop(images, crop, shifts[own].to(device))
            if self.augment.flip:
                images = torch.where(
                    mirror[own].to(device)[:, None, None, None], images.flip(-1), images
                )
            yield Batch(self.look.apply(images), self.data.labels[index], len(whole))


def _crop(images: Tensor, pad: int, shifts: Tensor) -> Tensor:
    """A window of the old size from each padded picture, each at its own place."""
    height, width = images.shape[2:]
    windows = F.pad(images, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
    rows = torch.arange(len(images), device=images.device)
    return windows[rows, :, shifts[:, 0], shifts[:, 1]]


def statistics(images: Tensor, sample: int = 10_000) -> Look:
    """Mean and spread per channel of the first pictures."""
    shown = images[:sample].double().transpose(0, 1).flatten(1) / 255
    return Look(_rounded(shown.mean(1)), _rounded(shown.std(1).clamp(min=1e-3)))


def _rounded(values: Tensor) -> tuple[float, ...]:
    numbers: Sequence[float] = values.tolist()
    return tuple(round(number, 4) for number in numbers)
