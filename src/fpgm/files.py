"""Files that are whole or not there, and known by their digest."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fpgm.errors import FileError
from fpgm.wording import reason


def file_sha256(path: Path) -> str:
    """Digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a file that appears under its name only when all of it is on the disk."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    write_whole(path, lambda stream: stream.write(text.encode()))


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Say of whatever the disk refuses in here which file it was about, and why."""
    try:
        yield
    except FileError:  # says all that already
        raise
    except OSError as error:
        raise FileError(f"{file} cannot be written: {reason(error)}.") from error


def sweep(folder: Path) -> None:
    """Remove what processes that were killed left half-written."""
    for leftover in folder.glob(".*.part"):
        with suppress(OSError):
            leftover.unlink()
