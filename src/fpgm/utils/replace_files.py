"""Replace several files of a folder together: all are new or all are old, even after a kill.

Old files are moved to a temporary folder, then new ones are moved in. This is not a single file
system operation, so the temporary folder records the progress, and after a kill the next process
restores the old files. A lock allows one process at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fpgm.utils.atomic_io import (
    BACKUP,
    exclusive_lock,
    list_unfinished,
    lock_abandoned,
    remove_abandoned,
)

NEW = "new"
_BACKED_UP = "out"
"""A marker that all old files are in the backup: those in their place are new."""
_DONE = "done"
"""The backup, no longer needed."""


def replace_files(place: Path, part: Path, names: Sequence[str], check: Callable[[], None]) -> None:
    """Replace all files with these names by those in `part`'s folder of new ones.

    `check` is called under the lock and may refuse to replace them.
    """
    with exclusive_lock(place):
        _undo_interrupted(place, names)
        check()
        _move_files(place, part, names)


def recover_interrupted_write(place: Path, names: Sequence[str]) -> None:
    """Restore the old files if a process was killed while it replaced them."""
    if list_unfinished(place):
        with exclusive_lock(place):
            _undo_interrupted(place, names)


def _move_files(place: Path, part: Path, names: Sequence[str]) -> None:
    kept = part / BACKUP
    kept.mkdir()
    try:
        for name in names:
            if (place / name).exists():
                (place / name).rename(kept / name)
        (part / _BACKED_UP).touch()
        for file in list((part / NEW).iterdir()):
            file.rename(place / file.name)
        kept.rename(part / _DONE)
    except BaseException:
        _undo(place, part, names)
        raise


def _undo_interrupted(place: Path, names: Sequence[str]) -> None:
    for part in list_unfinished(place):
        with lock_abandoned(part) as abandoned:
            if abandoned:
                with suppress(OSError):  # nothing can be restored on a read-only disk
                    _undo(place, part, names)
        remove_abandoned(part)


def _undo(place: Path, part: Path, names: Sequence[str]) -> None:
    """Restore the old files; idempotent, so it can be repeated after a kill."""
    kept = part / BACKUP
    if not kept.is_dir():
        return
    if (part / _BACKED_UP).exists():
        for name in names:
            (place / name).unlink(missing_ok=True)
        (part / _BACKED_UP).unlink()
    for file in list(kept.iterdir()):
        file.replace(place / file.name)
    kept.rmdir()
