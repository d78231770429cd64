"""Data sets by name, as in recipes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fpgm.data import cifar10
from fpgm.data.base import Batches, ProcessShare
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.image_folder import IMAGENET, FolderBatches
from fpgm.data.in_memory import Augment, Images, MemoryBatches, Normalization, channel_statistics
from fpgm.errors import FileError, RequestError
from fpgm.utils.safe_read import expand_user

CIFAR10 = Normalization((0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616))
"""The paper's: (125.3, 123.0, 113.9) / 255 and (63.0, 62.1, 66.7) / 255."""


@dataclass(frozen=True)
class DataSpec:
    """A recipe's table `data`: which images, the batch size, and how they are normalized."""

    name: str
    batch: int
    root: str | None = None
    crop: int = 0
    flip: bool | Literal["alternate"] = False
    cutout: int = 0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    limit: int | None = None
    """Use only this many of the first training images."""
    size: int = 224
    workers: int = 4

    @property
    def folder(self) -> Path | None:
        """The folder, if one was given."""
        return None if self.root is None else expand_user(self.root)

    @property
    def augment(self) -> Augment:
        """The augmentation of training images in memory."""
        return Augment(self.crop, self.flip, self.cutout)

    @property
    def normalization(self) -> Normalization | None:
        """The normalization, if not the data set's default."""
        given = self.mean is not None and self.std is not None
        return Normalization(self.mean or (), self.std or ()) if given else None


@dataclass(frozen=True)
class DataSplits:
    """Batches to train and to test on, the shape of one image, and the number of classes."""

    train: Batches
    test: Batches
    shape: tuple[int, ...]
    classes: int


def open_splits(
    spec: DataSpec, seed: int, share: ProcessShare, device: torch.device | str
) -> DataSplits:
    """Open the training and test batches of the data set a recipe names."""
    if spec.name == "folder":
        return _open_folders(spec, seed, share, device)
    if spec.name not in _IN_MEMORY:
        names = ", ".join(repr(name) for name in (*_IN_MEMORY, "folder"))
        raise RequestError(f"There is no data set {spec.name!r}: give one of {names}.")
    train, test, normalization = _IN_MEMORY[spec.name](spec)
    classes = 1 + max(int(part.labels.max()) for part in (train, test))
    channels = train.images.shape[1]
    normalization = spec.normalization or normalization
    if {len(normalization.mean), len(normalization.std)} - {1, channels}:
        raise RequestError(f"data.mean and data.std need {channels} numbers, one per channel.")
    if spec.limit is not None:
        train = train.take_first(spec.limit)
    return DataSplits(
        MemoryBatches(
            train,
            spec.batch,
            normalization,
            augment=spec.augment,
            seed=seed,
            share=share,
            device=device,
        ),
        MemoryBatches(test, max(spec.batch, 250), normalization, share=share, device=device),
        tuple(train.images.shape[1:]),
        classes,
    )


def _open_folders(
    spec: DataSpec, seed: int, share: ProcessShare, device: torch.device | str
) -> DataSplits:
    root = spec.folder
    if root is None:
        raise RequestError(
            "Image folders need data.root: set it to the folder that contains 'train' and 'val'."
        )
    if spec.limit is not None or spec.augment != Augment():
        raise RequestError(
            "data.limit, data.crop, data.flip and data.cutout are for data sets in memory: leave "
            "them out. Image folders are cropped and flipped as in training on ImageNet."
        )
    normalization = spec.normalization or IMAGENET
    train, test = (
        FolderBatches(
            root / part,
            spec.batch,
            normalization,
            size=spec.size,
            seed=order,
            share=share,
            workers=spec.workers,
            device=device,
        )
        for part, order in (("train", seed), ("val", None))
    )
    if unmatched := set(train.classes) ^ set(test.classes):
        raise FileError(
            f"{root}/train and {root}/val have different classes: {min(unmatched)!r} is in "
            "one of them only, so labels would not match."
        )
    return DataSplits(train, test, (3, spec.size, spec.size), len(train.classes))


def _cifar10(spec: DataSpec) -> tuple[Images, Images, Normalization]:
    data = cifar10.read(spec.folder or cifar10.default_root())
    train = Images(data.train_images, data.train_labels)
    return train, Images(data.test_images, data.test_labels), CIFAR10


def _cifar10_sample(spec: DataSpec) -> tuple[Images, Images, Normalization]:
    """Read the CIFAR-10 images that come with the package: 2,500 to calibrate, 1,000 to test."""
    return *read_sample(), CIFAR10


def _digits(spec: DataSpec) -> tuple[Images, Images, Normalization]:
    """Read scikit-learn's 1,797 handwritten digits of 8×8 pixels: 1,300 to train, 497 to test."""
    try:
        raw = importlib.import_module("sklearn.datasets").load_digits()
    except ModuleNotFoundError:
        raise RequestError(
            'The data set digits needs scikit-learn: pip install "fpgm[train]"'
        ) from None
    images = torch.tensor(raw.images * 255 / 16).round().to(torch.uint8)[:, None]
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = (Images(images[i], labels[i]) for i in (order[:1300], order[1300:]))
    return train, test, channel_statistics(train.images)


def _synthetic(spec: DataSpec) -> tuple[Images, Images, Normalization]:
    """Make ten random patterns of 3×16×16 under noise: learnable in seconds, for tests."""
    random = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 256, (10, 3, 16, 16), generator=random)

    def make(count: int) -> Images:
        labels = torch.randint(0, 10, (count,), generator=random)
        noise: Tensor = torch.randint(0, 256, (count, 3, 16, 16), generator=random)
        return Images(((patterns[labels] + noise) // 2).to(torch.uint8), labels)

    train, test = make(512), make(256)
    return train, test, channel_statistics(train.images)


_IN_MEMORY: dict[str, Callable[[DataSpec], tuple[Images, Images, Normalization]]] = {
    "cifar10": _cifar10,
    "cifar10-sample": _cifar10_sample,
    "digits": _digits,
    "synthetic": _synthetic,
}
