"""Whole data sets in memory as bytes, and batches of them, augmented together.

The content of a batch depends only on the seed, the epoch and the position, not on the number of
processes, nor on whether training was interrupted before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fpgm.data.base import SINGLE_PROCESS, Batch, ProcessShare, epoch_generator


@dataclass(frozen=True)
class Images:
    """Images as uint8 [N, C, H, W] and their labels [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take_first(self, count: int) -> Images:
        """Return the first `count` images."""
        return Images(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation per channel, for values in 0…1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, images: Tensor) -> Tensor:
        """Convert bytes to normalized floats.

        >>> Normalization((0.5,), (0.25,)).apply(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
        tensor([[[[-2.,  2.]]]])
        """
        shape = (1, -1, 1, 1)
        scale = torch.tensor(self.std, device=images.device).reshape(shape) * 255
        shift = torch.tensor(self.mean, device=images.device).reshape(shape) * 255
        return (images.float() - shift) / scale


@dataclass(frozen=True)
class Augment:
    """Random crops after padding with black, mirroring, and blanked squares."""

    crop: int = 0
    flip: bool | Literal["alternate"] = False
    """True: every image at random; "alternate": at random in the first epoch, then every other."""
    cutout: int = 0
    """Side of a square at a random place that becomes the data set's mean color."""


class MemoryBatches:
    """Batches of a data set in memory; augmentation works on bytes, on the device."""

    def __init__(
        self,
        data: Images,
        batch: int,
        normalization: Normalization,
        *,
        augment: Augment | None = None,
        seed: int | None = None,
        share: ProcessShare = SINGLE_PROCESS,
        device: torch.device | str = "cpu",
    ) -> None:
        """Move the data to the device.

        Args:
            data: Images and labels.
            batch: Batch size, over all processes.
            normalization: Mean and standard deviation to normalize with.
            augment: Random changes of training images; None: no augmentation.
            seed: Seeds augmentation and order; None: in order.
            share: Which of several processes this is.
            device: Where the data is kept and batches are augmented.
        """
        self.data = Images(data.images.to(device), data.labels.to(device))
        self.batch, self.normalization, self.share = batch, normalization, share
        self.augment = augment or Augment()
        self.seed = seed

    def __len__(self) -> int:
        return math.ceil(len(self.data) / self.batch)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield this process's share of every batch of an epoch."""
        count, crop = len(self.data), self.augment.crop
        device = self.data.labels.device
        order = torch.arange(count)
        shifts, mirror = torch.full((count, 2), crop), torch.zeros(count, dtype=torch.bool)
        cutout = None
        if self.seed is not None:
            random = epoch_generator(self.seed, number)
            order = torch.randperm(count, generator=random)
            shifts = torch.randint(0, 2 * crop + 1, (count, 2), generator=random)
            if self.augment.flip:
                mirror = self._choose_mirrored(number, order, random)
            if self.augment.cutout:
                size = torch.tensor(self.data.images.shape[2:])
                cutout = (torch.rand(count, 2, generator=random) * size).long()
        for start in range(0, count, self.batch):
            batch = range(start, min(start + self.batch, count))
            positions = torch.tensor(self.share.take(batch), dtype=torch.int64)
            index = order[positions].to(device)
            images = self.data.images[index]
            if crop:
                images = _crop(images, crop, shifts[positions].to(device))
            if self.augment.flip:
                images = torch.where(
                    mirror[positions].to(device)[:, None, None, None], images.flip(-1), images
                )
            images = self.normalization.apply(images)
            if cutout is not None:
                _blank_(images, self.augment.cutout, cutout[positions].to(device))
            yield Batch(images, self.data.labels[index], len(batch))

    def _choose_mirrored(self, epoch: int, order: Tensor, random: torch.Generator) -> Tensor:
        """Choose which images of an epoch are mirrored, in their order."""
        assert self.seed is not None
        if self.augment.flip != "alternate":
            return torch.rand(len(order), generator=random) < 0.5
        first = torch.rand(len(order), generator=epoch_generator(self.seed, -1)) < 0.5
        return first[order] ^ bool(epoch % 2)


def _crop(images: Tensor, pad: int, shifts: Tensor) -> Tensor:
    """Crop each padded image to its old size, at its own offset."""
    height, width = images.shape[2:]
    windows = F.pad(images, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
    rows = torch.arange(len(images), device=images.device)
    return windows[rows, :, shifts[:, 0], shifts[:, 1]]


def _blank_(images: Tensor, side: int, centers: Tensor) -> None:
    """Set a square of each normalized image to 0, which is the mean color."""
    sizes = images.shape[2:]
    inside = [
        (torch.arange(size, device=images.device) - centers[:, dim, None] + side // 2).div(
            side, rounding_mode="floor"
        )
        == 0
        for dim, size in enumerate(sizes)
    ]
    images.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)


def channel_statistics(images: Tensor, sample: int = 10_000) -> Normalization:
    """Compute mean and standard deviation per channel of the first images."""
    values = images[:sample].double().transpose(0, 1).flatten(1) / 255
    return Normalization(
        _round_values(values.mean(1)), _round_values(values.std(1).clamp(min=1e-3))
    )


def _round_values(values: Tensor) -> tuple[float, ...]:
    numbers: Sequence[float] = values.tolist()
    return tuple(round(number, 4) for number in numbers)
