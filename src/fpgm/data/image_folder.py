"""Folders of images with one subfolder per class, like ImageNet; torchvision reads them."""

from __future__ import annotations

import importlib
import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fpgm.data.base import SINGLE_PROCESS, Batch, ProcessShare, epoch_generator
from fpgm.data.in_memory import Normalization
from fpgm.errors import FileError, RequestError
from fpgm.models.torchvision_import import import_torchvision
from fpgm.utils.safe_read import regular_file_size
from fpgm.utils.thread_lock import suppress_warnings

IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class FolderBatches:
    """Batches read by worker processes; crops and flips as in ImageNet training."""

    def __init__(
        self,
        folder: Path,
        batch: int,
        normalization: Normalization,
        *,
        size: int = 224,
        seed: int | None = None,
        share: ProcessShare = SINGLE_PROCESS,
        workers: int = 4,
        device: torch.device | str = "cpu",
    ) -> None:
        """Open a folder.

        Args:
            folder: Contains one subfolder per class.
            batch: Batch size, over all processes.
            normalization: Mean and standard deviation to normalize with.
            size: Height and width of the crops.
            seed: Seeds augmentation and order; None: center crops in order.
            share: Which of several processes this is.
            workers: Worker processes that read images.
            device: Where batches are put.
        """
        self.data = open_folder(folder, normalization, size, augmented=seed is not None)
        self.batch, self.seed, self.share = batch, seed, share
        self.workers, self.device, self.size = workers, device, size

    @property
    def classes(self) -> list[str]:
        """The names of the folders, in the order of their labels."""
        names: list[str] = self.data.classes  # type: ignore[attr-defined]
        return names

    def __len__(self) -> int:
        return math.ceil(self._count() / self.batch)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield this process's share of every batch of an epoch."""
        count = self._count()
        order = torch.arange(count)
        random = epoch_generator(self.seed or 0, number)
        if self.seed is not None:
            order = torch.randperm(count, generator=random)
        parts = [
            range(start, min(start + self.batch, count)) for start in range(0, count, self.batch)
        ]
        shares = [order[self.share.take(part)].tolist() for part in parts]
        # More workers than processors are fine, and their number affects the random crops.
        with suppress_warnings(), _block_interrupt():
            loader: Any = DataLoader(
                self.data,
                batch_sampler=[part for part in shares if part],
                num_workers=self.workers,
                generator=random.manual_seed(random.initial_seed() + self.share.rank),
            )
            loaded = iter(loader)
        nothing = torch.zeros(0, 3, self.size, self.size), torch.zeros(0, dtype=torch.int64)
        for part, indices in zip(parts, shares, strict=True):
            # The last images may be too few for every process to have one.
            images, labels = _next_batch(loaded) if indices else nothing
            yield Batch(images.to(self.device), labels.to(self.device), len(part))

    def _count(self) -> int:
        return len(self.data)  # type: ignore[arg-type]


@contextmanager
def _block_interrupt() -> Iterator[None]:
    """Keep Ctrl-C for this process: workers that start meanwhile never receive it.

    A worker that is interrupted while it imports prints a traceback. This process ends its workers
    when it ends; an interrupt that arrives meanwhile is delivered afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _next_batch(loaded: Iterator[Any]) -> Any:
    try:
        return next(loaded)
    except FileError as error:  # a worker's comes wrapped in its traceback
        raise FileError(str(error).strip().splitlines()[-1].rpartition("FileError: ")[2]) from None


def open_folder(
    folder: Path, normalization: Normalization, size: int, augmented: bool
) -> Dataset[Any]:
    """Open a torchvision ImageFolder with the usual transforms."""
    if not folder.is_dir():
        raise FileError(
            f"There is no folder {folder}: give a folder that contains train/CLASS/… and "
            "val/CLASS/…, or the name of a data set (cifar10, cifar10-sample, digits, synthetic)."
        )
    import_torchvision("A folder of images")
    datasets = importlib.import_module("torchvision.datasets")
    transforms = importlib.import_module("torchvision.transforms")
    to_input = [transforms.ToTensor(), transforms.Normalize(normalization.mean, normalization.std)]
    steps: Sequence[Any] = (
        [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *to_input]
        if augmented
        else [transforms.Resize(round(size / 0.875)), transforms.CenterCrop(size), *to_input]
    )
    try:
        dataset: Dataset[Any] = datasets.ImageFolder(
            str(folder), transforms.Compose(steps), loader=_load_image
        )
    except FileNotFoundError as error:
        line = str(error).splitlines()[0]
        raise RequestError(f"{folder} is not a folder of images: {line}") from None
    return dataset


def _load_image(path: str) -> Any:
    try:
        regular_file_size(Path(path))
        return importlib.import_module("torchvision.datasets.folder").default_loader(path)
    except Exception as error:  # Pillow raises many kinds of errors
        raise FileError(f"{path} is not a readable image: remove it.") from error
