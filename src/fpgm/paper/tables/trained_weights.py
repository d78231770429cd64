"""Where trained weights are found, and by what they are known."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fpgm.paper.tables.table_schema import Row
from fpgm.utils.atomic_io import file_sha256

ENDINGS = (".safetensors", ".pth", ".pt")


def weights_name(row: Row) -> str:
    """How the file of a network's trained weights is called; a torch checkpoint ends otherwise.

    >>> from fpgm.paper.tables.paper_tables import TABLES
    >>> weights_name(TABLES["table1"].rows[-1]), weights_name(TABLES["table2"].rows[-1])
    ('cifar10_resnet110.safetensors', 'imagenet_resnet101.safetensors')
    """
    return f"{'imagenet' if row.imagenet else 'cifar10'}_{row.net}{ENDINGS[0]}"


def find_weights(place: Path, row: Row) -> Path | None:
    """A network's trained weights in a folder; a file is taken for what it is said to be."""
    if place.is_file():
        return place
    names = [Path(weights_name(row)).with_suffix(ending) for ending in ENDINGS]
    return next((file for name in names if (file := place / name).is_file()), None)


def digest(file: Path | None) -> str | None:
    """SHA-256 of a file that is there."""
    if file is None or not file.is_file():
        return None
    found = file.stat()
    return _digest(file, found.st_mtime_ns, found.st_size)


@cache
def _digest(file: Path, changed: int, size: int) -> str:
    return file_sha256(file)
