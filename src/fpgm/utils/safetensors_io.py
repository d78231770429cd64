"""Reading and checking safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fpgm.errors import FileError
from fpgm.utils.safe_read import regular_file_size
from fpgm.utils.text import reason

SHARED_KEY = "fpgm_shared"
"""Under this key the metadata name the tensors that are stored under another name, as JSON."""


def read_head(path: Path) -> bytes:
    """Read the first bytes of a file, which tell its format; FileError if that fails."""
    try:
        regular_file_size(path)
        with path.open("rb") as stream:
            head = stream.read(9)
    except FileNotFoundError:
        raise FileError(f"{path} does not exist.") from None
    except IsADirectoryError:
        raise FileError(f"{path} is a folder: name the file in it.") from None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {reason(error)}.") from error
    if not head:
        raise FileError(f"{path} is empty.")
    return head


def is_safetensors(head: bytes) -> bool:
    """Whether a file begins as safetensors files do: a length, then JSON."""
    return head[8:9] == b"{"


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file's tensors as they are stored, and its metadata."""
    try:
        with _utf8_path(path) as name, safe_open(name, framework="pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            return tensors, stream.metadata() or {}
    except (SafetensorError, OSError, MemoryError) as error:
        raise FileError(f"{path} is truncated or damaged: {reason(error)}.") from error


@contextmanager
def _utf8_path(path: Path) -> Iterator[str]:
    """Yield a path in UTF-8, as safetensors needs it; else one by file descriptor."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as stream:
            yield f"/dev/fd/{stream.fileno()}"
    else:
        yield str(path)


def add_shared_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the tensors under all their names: shared ones are stored once."""
    try:
        shared = json.loads(metadata.get(SHARED_KEY, "{}"))
        return {**tensors, **{name: tensors[same] for name, same in shared.items()}}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(
            f"{path} names shared tensors that cannot be found: {reason(error)}."
        ) from error
