"""A data set by name, as recipes give it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fpgm.data import cifar10
from fpgm.data.base import Batches, Share
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.image_folder import IMAGENET, FolderBatches
from fpgm.data.in_memory import Augment, Images, Look, MemoryBatches, statistics
from fpgm.errors import FileError, RequestError
from fpgm.utils.safe_read import at_home

CIFAR10 = Look((0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616))
"""The paper's: (125.3, 123.0, 113.9) / 255 and (63.0, 62.1, 66.7) / 255."""


@dataclass(frozen=True)
class Wanted:
    """Which pictures, how many at once, and how they are shown, as a recipe says it."""

    name: str
    batch: int
    root: str | None = None
    crop: int = 0
    flip: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    limit: int | None = None
    """Use only the first so many training pictures."""
    size: int = 224
    workers: int = 4

    @property
    def folder(self) -> Path | None:
        """Where it lies, if that was said."""
        return None if self.root is None else at_home(self.root)

    @property
    def augment(self) -> Augment:
        """What is done to training pictures in memory."""
        return Augment(self.crop, self.flip)

    @property
    def look(self) -> Look | None:
        """How pictures are shown, if not as the data set has it."""
        given = self.mean is not None and self.std is not None
        return Look(self.mean or (), self.std or ()) if given else None


@dataclass(frozen=True)
class Sets:
    """Batches to train and to test on, the shape of one picture, and the number of classes."""

    train: Batches
    test: Batches
    shape: tuple[int, ...]
    classes: int


def open_sets(wanted: Wanted, seed: int, share: Share, device: torch.device | str) -> Sets:
    """Training and test batches of the data set a recipe names."""
    if wanted.name == "folder":
        return _folders(wanted, seed, share, device)
    if wanted.name not in _IN_MEMORY:
        names = ", ".join(repr(name) for name in (*_IN_MEMORY, "folder"))
        raise RequestError(f"There is no data set {wanted.name!r}: give one of {names}.")
    train, test, look = _IN_MEMORY[wanted.name](wanted)
    classes = 1 + max(int(part.labels.max()) for part in (train, test))
    channels = train.images.shape[1]
    look = wanted.look or look
    if {len(look.mean), len(look.std)} - {1, channels}:
        raise RequestError(f"data.mean and data.std need {channels} numbers, one a channel.")
    if wanted.limit is not None:
        train = train.first(wanted.limit)
    return Sets(
        MemoryBatches(
            train,
            wanted.batch,
            look,
            augment=wanted.augment,
            seed=seed,
            share=share,
            device=device,
        ),
        MemoryBatches(test, max(wanted.batch, 250), look, share=share, device=device),
        tuple(train.images.shape[1:]),
        classes,
    )


def _folders(wanted: Wanted, seed: int, share: Share, device: torch.device | str) -> Sets:
    root = wanted.folder
    if root is None:
        raise RequestError("Pictures in folders need data.root: it holds 'train' and 'val'.")
    if wanted.limit is not None or wanted.augment != Augment():
        raise RequestError(
            "data.limit, data.crop and data.flip are for data sets in memory: leave them out, "
            "folders are cropped and mirrored as ImageNet is."
        )
    look = wanted.look or IMAGENET
    train, test = (
        FolderBatches(
            root / part,
            wanted.batch,
            look,
            size=wanted.size,
            seed=order,
            share=share,
            workers=wanted.workers,
            device=device,
        )
        for part, order in (("train", seed), ("val", None))
    )
    if lone := set(train.classes) ^ set(test.classes):
        raise FileError(
            f"{root}/train and {root}/val hold other classes: {min(lone)!r} is in "
            "one of them only, so labels would not agree."
        )
    return Sets(train, test, (3, wanted.size, wanted.size), len(train.classes))


def _cifar10(wanted: Wanted) -> tuple[Images, Images, Look]:
    data = cifar10.read(wanted.folder or cifar10.default_root())
    train = Images(data.train_images, data.train_labels)
    return train, Images(data.test_images, data.test_labels), CIFAR10


def _sample(wanted: Wanted) -> tuple[Images, Images, Look]:
    """The first pictures of CIFAR-10, which come with the package: 900 to train, 1,000 to test."""
    return *read_sample(), CIFAR10


def _digits(wanted: Wanted) -> tuple[Images, Images, Look]:
    """scikit-learn's 1,797 handwritten digits of 8×8 pixels: 1,300 to train, 497 to test."""
    try:
        raw = importlib.import_module("sklearn.datasets").load_digits()
    except ModuleNotFoundError:
        raise RequestError('scikit-learn is not installed: pip install "fpgm[train]"') from None
    images = torch.tensor(raw.images * 255 / 16).round().to(torch.uint8)[:, None]
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = (Images(images[i], labels[i]) for i in (order[:1300], order[1300:]))
    return train, test, statistics(train.images)


def _synthetic(wanted: Wanted) -> tuple[Images, Images, Look]:
    """Ten random patterns of 3×16×16 under noise: learnable in seconds, for tests."""
    random = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 256, (10, 3, 16, 16), generator=random)

    def some(count: int) -> Images:
        labels = torch.randint(0, 10, (count,), generator=random)
        noise: Tensor = torch.randint(0, 256, (count, 3, 16, 16), generator=random)
        return Images(((patterns[labels] + noise) // 2).to(torch.uint8), labels)

    train, test = some(512), some(256)
    return train, test, statistics(train.images)


_IN_MEMORY: dict[str, Callable[[Wanted], tuple[Images, Images, Look]]] = {
    "cifar10": _cifar10,
    "cifar10-sample": _sample,
    "digits": _digits,
    "synthetic": _synthetic,
}
