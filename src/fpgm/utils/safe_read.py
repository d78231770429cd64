"""Safe reading of untrusted files: regular files only, of limited size and nesting.

Errors are OSError or ValueError, for callers to add their context.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from fpgm.errors import FileError
from fpgm.utils.text import reason

MAX_BYTES = 256 * 2**20
"""Largest size of a text file, far above that of any plan."""


def regular_file_size(path: Path) -> int:
    """Return the size of a file; OSError if it is not a regular file (a pipe may block)."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status.st_size


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a file; what is appended meanwhile is not read."""
    size = regular_file_size(path)
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    with path.open("rb") as stream:
        return stream.read(size)


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """Read a text file; UnicodeDecodeError if it is not text."""
    return read_bytes(path, most).decode()


def parse_json(text: str) -> Any:
    """Parse JSON; ValueError if it is invalid or nested too deeply.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
        ...
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """Read a JSON file; OSError or ValueError if that fails."""
    return parse_json(read_text(path))


def expand_user(name: str | Path) -> Path:
    """Expand a leading tilde of a path."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~nobody
        raise FileError(f"{name} does not exist: {reason(error)}.") from error


def cache_root(variable: str) -> Path:
    """Return the cache folder: the one the environment variable names, or ~/.cache/fpgm.

    A user without a home, as in some containers, has a folder among the temporary files instead.
    """
    if value := os.environ.get(variable):
        return expand_user(value)
    try:
        return Path("~/.cache/fpgm").expanduser()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"fpgm-{os.getuid()}"
