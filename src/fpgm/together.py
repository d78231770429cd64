"""Several files of a folder replaced together: all are new or all are old, even after a kill.

The old ones are moved aside, the new ones in. A file system cannot do that at once, so the folder
aside tells by its names how far it came, and the next process to look goes back to the old ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fpgm.files import dead, unfinished

NEW = "new"
_LEAVING = "leaving"
"""Old files that are out; others may still be in their place."""
_LEFT = "left"
"""All old files: what is in their place is new."""
_DONE = "done"
"""All old files, no longer wanted."""


def swap(place: Path, part: Path, names: Sequence[str]) -> None:
    """Replace all files with these names by those in `part`'s folder of new ones."""
    (part / _LEAVING).mkdir()
    try:
        for name in names:
            if (place / name).exists():
                (place / name).rename(part / _LEAVING / name)
        (part / _LEAVING).rename(part / _LEFT)
        for file in list((part / NEW).iterdir()):
            file.rename(place / file.name)
        (part / _LEFT).rename(part / _DONE)
    except BaseException:
        _undo(place, part, names)
        raise


def settle(place: Path, names: Sequence[str]) -> None:
    """Bring back what was there before, if a process was killed half-way through a swap."""
    for part in unfinished(place):
        if part.is_dir():
            with dead(part) as gone:
                if gone:
                    with suppress(OSError):  # on a disk that is only read nothing can be mended
                        _undo(place, part, names)
                        shutil.rmtree(part)


def _undo(place: Path, part: Path, names: Sequence[str]) -> None:
    """Done again after a kill within, it comes to the same."""
    if (part / _LEFT).is_dir():
        for name in names:
            (place / name).unlink(missing_ok=True)
        (part / _LEFT).rename(part / _LEAVING)
    if (part / _LEAVING).is_dir():
        for file in list((part / _LEAVING).iterdir()):
            file.replace(place / file.name)
