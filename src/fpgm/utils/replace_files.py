"""Several files of a folder replaced together: all are new or all are old, even after a kill.

The old ones are moved aside, the new ones in. A file system cannot do that at once, so the folder
aside tells how far it came, and the next process to look goes back to the old ones. One process at
a time does either.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fpgm.utils.atomic_io import KEPT, alone, dead, unfinished

NEW = "new"
_OUT = "out"
"""A mark that all old files are kept: what is in their place is new."""
_DONE = "done"
"""All old files, no longer wanted."""


def swap(place: Path, part: Path, names: Sequence[str], check: Callable[[], None]) -> None:
    """Replace all files with these names by those in `part`'s folder of new ones.

    `check` may refuse what it finds there, once nobody else is at it.
    """
    with alone(place):
        _settle(place, names)
        check()
        _move(place, part, names)


def settle(place: Path, names: Sequence[str]) -> None:
    """Bring back what was there before, if a process was killed half-way through a swap."""
    if unfinished(place):
        with alone(place):
            _settle(place, names)


def _move(place: Path, part: Path, names: Sequence[str]) -> None:
    kept = part / KEPT
    kept.mkdir()
    try:
        for name in names:
            if (place / name).exists():
                (place / name).rename(kept / name)
        (part / _OUT).touch()
        for file in list((part / NEW).iterdir()):
            file.rename(place / file.name)
        kept.rename(part / _DONE)
    except BaseException:
        _undo(place, part, names)
        raise


def _settle(place: Path, names: Sequence[str]) -> None:
    for part in unfinished(place):
        with dead(part) as gone:
            if gone:
                with suppress(OSError):  # on a disk that is only read nothing can be mended
                    _undo(place, part, names)
                    shutil.rmtree(part)


def _undo(place: Path, part: Path, names: Sequence[str]) -> None:
    """Done again after a kill within, it comes to the same."""
    kept = part / KEPT
    if not kept.is_dir():
        return
    if (part / _OUT).exists():
        for name in names:
            (place / name).unlink(missing_ok=True)
        (part / _OUT).unlink()
    for file in list(kept.iterdir()):
        file.replace(place / file.name)
    kept.rmdir()
