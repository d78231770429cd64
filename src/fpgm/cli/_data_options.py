"""The data that subcommands look at: which, how many, and how they are shown to the model."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from fpgm.data.base import ALONE
from fpgm.data.loaders import Once
from fpgm.data.registry import Wanted, open_sets
from fpgm.errors import RequestError
from fpgm.utils.text import reason

BATCH = 128

Data = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR",
        help="cifar10, cifar10-sample, digits, synthetic, or a folder with train/ and val/.",
    ),
]
Images = Annotated[int, typer.Option(metavar="N", help="Training pictures to look at.")]
Test = Annotated[
    int, typer.Option("--test", metavar="N", help="Test pictures to count accuracy on; 0: none.")
]
Counted = Annotated[
    int, typer.Option("--test", metavar="N", help="Test pictures to count accuracy on.")
]
Mean = Annotated[
    str | None, typer.Option(metavar="R,G,B", help="Mean the model's inputs were freed of.")
]
Std = Annotated[str | None, typer.Option(metavar="R,G,B", help="Spread they were divided by.")]


class Pictures(Once):
    """Batches to look at, and labelled ones to count accuracy on."""

    @torch.no_grad()
    def check(self, net: nn.Module, data: str, model: str) -> None:
        """Refuse pictures that the model cannot take, before anything long is done."""
        size = "x".join(str(n) for n in self.sets.shape)
        try:
            net(next(iter(self))[0][:1])
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"--data {data} gives pictures of {size}, which {model} cannot take: "
                f"{reason(error)}."
            ) from error

    @torch.no_grad()
    def accuracy(self, model: nn.Module, count: int) -> float | None:
        """Share of the first so many test pictures that a classifier gets right."""
        right, seen = self.right(model, count)
        return right / seen if seen else None

    @torch.no_grad()
    def right(self, model: nn.Module, count: int) -> tuple[int, int]:
        """How many of those a classifier gets right, and how many there are; none for others."""
        right = seen = 0
        for batch in self.sets.test.epoch(0):
            if seen >= count:
                break
            out = model(batch.images)
            if not isinstance(out, Tensor) or out.ndim != 2:
                return 0, 0
            labels = batch.labels[: count - seen]
            right += int((out[: len(labels)].argmax(1) == labels).sum())
            seen += len(labels)
        return right, seen


def open_pictures(
    data: str, mean: str | None, std: str | None, size: int, *, augment: bool = False
) -> Pictures:
    """The data an option names; folders are cropped to `size`.

    `augment` shifts and mirrors CIFAR-10's training pictures, as its recipes do; those in folders
    are cropped and mirrored always.
    """
    named = data in ("cifar10", "cifar10-sample", "digits", "synthetic")
    moved = augment and data.startswith("cifar10")
    if (mean is None) != (std is None):
        raise RequestError("--mean and --std go together: give both or neither.")
    wanted = Wanted(
        data if named else "folder",
        BATCH if named else min(BATCH, 32),
        root=None if named else data,
        crop=4 if moved else 0,
        flip=moved,
        mean=None if mean is None else _numbers("--mean", mean),
        std=None if std is None else _spread(std),
        size=size,
    )
    return Pictures(open_sets(wanted, 0, ALONE, "cpu"))


def _spread(text: str) -> tuple[float, ...]:
    """What inputs are divided by."""
    found = _numbers("--std", text)
    if not all(0 < own < math.inf for own in found):
        raise RequestError(
            f"--std is {text!r}: inputs are divided by it, so give positive numbers."
        )
    return found


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between.

    >>> _numbers("--mean", "0.5,0.25")
    (0.5, 0.25)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise RequestError(
            f"{option} is {text!r}: write numbers with commas, 0.485,0.456,0.406."
        ) from None
