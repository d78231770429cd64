"""Options for the data that commands use: which set, how many images, and normalization."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from fpgm.data.base import SINGLE_PROCESS
from fpgm.data.loaders import FirstEpoch
from fpgm.data.registry import DataSpec, open_splits
from fpgm.errors import RequestError
from fpgm.utils.accuracy import AccuracyCounter
from fpgm.utils.distributed import is_main_process
from fpgm.utils.text import reason

BATCH = 128

Data = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR",
        help="cifar10, cifar10-sample, digits, synthetic, or a folder with train/ and val/.",
    ),
]
Images = Annotated[int, typer.Option(metavar="N", help="Use this many training images.")]
Test = Annotated[
    int,
    typer.Option("--test", metavar="N", help="Measure accuracy on this many test images; 0: none."),
]
RequiredTest = Annotated[
    int, typer.Option("--test", metavar="N", help="Measure accuracy on this many test images.")
]
Mean = Annotated[str | None, typer.Option(metavar="R,G,B", help="Subtract this mean from inputs.")]
Std = Annotated[
    str | None, typer.Option(metavar="R,G,B", help="Divide inputs by this standard deviation.")
]


class LabelledImages(FirstEpoch):
    """Training batches for calibration, and test batches to measure accuracy on."""

    @torch.no_grad()
    def check(self, net: nn.Module, data: str, model: str) -> None:
        """Refuse images that the model cannot take, before any long work.

        If the model has more classes, one line on stderr says so.
        """
        size = "x".join(str(n) for n in self.sets.shape)
        try:
            out = net(next(iter(self))[0][:1])
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"--data {data} gives images of {size}, which {model} cannot take: {reason(error)}."
            ) from error
        classes = out.shape[1] if isinstance(out, Tensor) and out.ndim == 2 else 0
        if classes > self.sets.classes and is_main_process():
            typer.echo(
                f"fpgm: {model} has {classes} classes and --data {data} has {self.sets.classes}: "
                "accuracy means little unless they are numbered alike.",
                err=True,
            )

    @torch.no_grad()
    def accuracy(self, model: nn.Module, count: int) -> float | None:
        """Return the accuracy on `count` test images; None if the model is not a classifier."""
        correct, total = self.count_correct(model, count)
        return correct / total if total else None

    @torch.no_grad()
    def count_correct(self, model: nn.Module, count: int) -> tuple[int, int]:
        """Count correct and all predictions; (0, 0) if the model is not a classifier."""
        counter = AccuracyCounter()
        for batch in self.sets.test.epoch(0):
            if counter.total >= count:
                break
            labels = batch.labels[: count - counter.total]
            out = model(batch.images)
            if not counter.add(out[: len(labels)] if isinstance(out, Tensor) else out, labels):
                return 0, 0
        return counter.correct, counter.total


def open_images(
    data: str, mean: str | None, std: str | None, size: int, *, augment: bool = False
) -> LabelledImages:
    """Open the data set that `--data` names.

    Args:
        size: images in folders are cropped to this size.
        augment: shift and mirror CIFAR-10's training images, as its recipes do; images in
            folders are always cropped and mirrored.
    """
    is_name = data in ("cifar10", "cifar10-sample", "digits", "synthetic")
    augmented = augment and data.startswith("cifar10")
    if (mean is None) != (std is None):
        raise RequestError("--mean and --std go together: give both or neither.")
    spec = DataSpec(
        data if is_name else "folder",
        BATCH if is_name else min(BATCH, 32),
        root=None if is_name else data,
        crop=4 if augmented else 0,
        flip=augmented,
        mean=None if mean is None else _read_numbers("--mean", mean),
        std=None if std is None else _read_std(std),
        size=size,
    )
    return LabelledImages(open_splits(spec, 0, SINGLE_PROCESS, "cpu"))


def _read_std(text: str) -> tuple[float, ...]:
    """Read `--std`, which must be positive."""
    values = _read_numbers("--std", text)
    if not all(0 < value < math.inf for value in values):
        raise RequestError(
            f"--std is {text!r}: inputs are divided by it, so give positive numbers."
        )
    return values


def _read_numbers(option: str, text: str) -> tuple[float, ...]:
    """Read numbers separated by commas.

    >>> _read_numbers("--mean", "0.5,0.25")
    (0.5, 0.25)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise RequestError(
            f"{option} is {text!r}: write numbers with commas, 0.485,0.456,0.406."
        ) from None
