"""Find the files with trained weights of the paper's networks, and compute their digests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fpgm.paper.tables.table_schema import TableRow
from fpgm.utils.atomic_io import file_sha256

SUFFIXES = (".safetensors", ".pth", ".pt")


def weights_name(row: TableRow) -> str:
    """Return the file name of a network's trained weights; .pth and .pt are accepted too.

    >>> from fpgm.paper.tables.paper_tables import TABLES
    >>> weights_name(TABLES["table1"].rows[-1]), weights_name(TABLES["table2"].rows[-1])
    ('cifar10_resnet110.safetensors', 'imagenet_resnet101.safetensors')
    """
    return f"{'imagenet' if row.imagenet else 'cifar10'}_{row.network_name}{SUFFIXES[0]}"


def find_weights(folder: Path, row: TableRow) -> Path | None:
    """Find a network's trained weights.

    Args:
        folder: a folder with weights of several networks, or one file, which is returned as it is.
        row: names the network.
    """
    if folder.is_file():
        return folder
    names = [Path(weights_name(row)).with_suffix(ending) for ending in SUFFIXES]
    return next((file for name in names if (file := folder / name).is_file()), None)


def weights_digest(file: Path | None) -> str | None:
    """Compute the SHA-256 of a file; None if it does not exist."""
    if file is None or not file.is_file():
        return None
    info = file.stat()
    return _cached_digest(file, info.st_mtime_ns, info.st_size)


@cache
def _cached_digest(file: Path, changed: int, size: int) -> str:
    return file_sha256(file)
