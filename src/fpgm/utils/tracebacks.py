"""Where in the user's own code something happens, or an error came from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

import torch

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep


def user_line(error: BaseException) -> str:
    """File and line of the innermost frame that is neither torch's nor this package's."""
    place = ""
    for name, line in _frames(error.__traceback__):
        if (file := user_file(name)) is not None:
            place = f"{file}:{line}"
    return place


@cache
def user_file(name: str) -> str | None:
    """Return the name of a file without its folder; None if it is torch's, Python's or ours."""
    ours = name.startswith(_PACKAGE) and not name.startswith(_PACKAGE + "models")
    pythons = name.startswith(_STANDARD_LIBRARY) and "site-packages" not in name
    if ours or pythons or name.startswith(_TORCH) or not Path(name).is_file():
        return None
    return Path(name).name


def describe_error(error: BaseException) -> str:
    r"""Say in one line what was raised, and where in the user's code if that is known.

    >>> describe_error(ValueError("two\nlines.")), describe_error(KeyError("x"))
    ('two lines', "KeyError 'x'")
    """
    text = " ".join(str(error).split()).rstrip(".")
    kind, line = type(error).__name__, user_line(error)
    if line:
        return f"{text} ({kind} in {line})" if text else f"{kind} in {line}"
    return text if " " in text else f"{kind} {text}".rstrip()


def _frames(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next


def source_line() -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (file := user_file(frame.f_code.co_filename)) is not None:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
