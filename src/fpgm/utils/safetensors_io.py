"""Reading safetensors files: what is looked at before a file is believed, and what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fpgm.errors import FileError
from fpgm.utils.safe_read import ordinary
from fpgm.utils.text import reason

SHARED = "fpgm_shared"
"""Under this key the metadata name the tensors that are stored under another name, as JSON."""


def first_bytes(path: Path) -> bytes:
    """As much of a file as tells its kind; what is no readable file is refused."""
    try:
        ordinary(path)
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
    """A file's tensors as they are stored, and its metadata."""
    try:
        with _in_text(path) as name, safe_open(name, framework="pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            return tensors, stream.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is truncated or damaged: {reason(error)}.") from error


@contextmanager
def _in_text(path: Path) -> Iterator[str]:
    """A name in UTF-8, as safetensors wants it: of a file that has none, the system's for it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as stream:
            yield f"/dev/fd/{stream.fileno()}"
    else:
        yield str(path)


def with_shared(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors under all their names: those that modules share are stored once."""
    try:
        shared = json.loads(metadata.get(SHARED, "{}"))
        return {**tensors, **{name: tensors[same] for name, same in shared.items()}}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(
            f"{path} names shared tensors that cannot be found: {reason(error)}."
        ) from error
