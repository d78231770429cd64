"""Reading what anyone may have written: ordinary files only, none without end, none that nests so.

Faults come as the OSError or ValueError that a caller expects of any file, for its own words.
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

LARGEST = 256 * 2**20
"""Bytes of a text: no plan of any network comes near."""


def ordinary(path: Path) -> int:
    """How many bytes a file has; what is no file is an OSError: some pipes never say a word."""
    about = path.stat()
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    return about.st_size


def bytes_of(path: Path, most: int = LARGEST) -> bytes:
    """What is in a file; what it grows by meanwhile is not read."""
    size = ordinary(path)
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    with path.open("rb") as stream:
        return stream.read(size)


def text_of(path: Path, most: int = LARGEST) -> str:
    """The text in a file; UnicodeDecodeError if it is none."""
    return bytes_of(path, most).decode()


def parsed(text: str) -> Any:
    """JSON; what nests too deep is a ValueError, as all that is none.

    >>> parsed("[" * 100_000)
    Traceback (most recent call last):
        ...
    ValueError: it nests too deep
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def json_of(path: Path) -> Any:
    """The JSON in a file: OSError or ValueError if there is none."""
    return parsed(text_of(path))


def at_home(name: str | Path) -> Path:
    """A path that may begin with a tilde."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~nobody
        raise FileError(f"{name} does not exist: {reason(error)}.") from error


def cache_root(variable: str) -> Path:
    """Where things are kept: as the environment says, or ~/.cache/fpgm.

    A user without a home, as in some containers, has a folder among the temporary files instead.
    """
    if told := os.environ.get(variable):
        return at_home(told)
    try:
        return Path("~/.cache/fpgm").expanduser()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"fpgm-{os.getuid()}"
