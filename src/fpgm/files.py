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


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to fill in here; it has the name `path` only when all of it is on the disk.

    Through a link, the file it points to is replaced, not the link. It is as readable as any other.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        with part.open("rb+") as stream:
            os.fsync(stream.fileno())
        part.chmod(mode)  # safetensors lets nobody else read what it writes
        part.replace(target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a file that is whole or not there, as with `whole`."""
    with whole(path) as part, part.open("wb") as stream:
        write(stream)


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
