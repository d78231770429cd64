"""Files that are whole or not there, and known by their digest."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


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
