"""Files that are whole or not there, and known by their digest.

What is being written lies in a folder of its own beside its place, locked as long as the process
lives: so what a killed one left is told from what another is at, and removed by the next. Folders
are locked by handle, which keeps threads of one process apart too; files, that are held for long,
by process, since workers that are forked meanwhile would else hold them on.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fpgm.errors import FileError
from fpgm.utils.safe_read import ordinary
from fpgm.utils.text import reason

KEPT = "kept"
"""In an unfinished folder, what has to go back to its place before that folder may be removed."""
_LONGEST = 40
"""Letters of a name that its unfinished folder has too: names have an end."""
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.part", re.DOTALL)


def file_sha256(path: Path) -> str:
    """Digest of a file's bytes."""
    ordinary(path)
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to fill in here; it has the name `path` only when all of it is on the disk.

    Through a link, the file it points to is replaced, not the link. It is as readable as any other.
    A device or a pipe is no file that could be replaced: it is refused.
    """
    target = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        ordinary(target)
    with aside(target.parent, target.name) as folder:
        part = folder / "part"
        part.touch()
        mode = part.stat().st_mode
        yield part
        with part.open("rb+") as stream:
            os.fsync(stream.fileno())
        part.chmod(mode)  # safetensors lets nobody else read what it writes
        part.replace(target)


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a file that is whole or not there, as with `whole`."""
    with whole(path) as part, part.open("wb") as stream:
        write(stream)


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all.

    A name that was no text, as file systems allow, is written by its escapes, which JSON knows.
    """
    content = text.encode(errors="backslashreplace")
    write_whole(path, lambda stream: stream.write(content))


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Say of whatever the disk refuses in here which file it was about, and why."""
    try:
        yield
    except FileError:  # says all that already
        raise
    except OSError as error:
        raise FileError(f"{file} cannot be written: {reason(error)}.") from error


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """A folder, with those above it; what of them was made for nothing goes again."""
    new = [own for own in (folder, *folder.parents) if not own.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for own in new:
            with suppress(OSError):  # it was not made, or others have put something there
                own.rmdir()
        raise


@contextmanager
def aside(folder: Path, name: str) -> Iterator[Path]:
    """A folder in `folder`, to make in it what is to be called `name`; gone afterwards."""
    start = f".{name[:_LONGEST]}."
    for left in unfinished(folder):
        if left.name.startswith(start):
            _remove_dead(left)
    part, held = _new_part(folder, start)
    try:
        yield part
    finally:
        _remove(part)
        if held is not None:
            os.close(held)


def unfinished(folder: Path) -> list[Path]:
    """What processes are at in a folder, or left when they were killed."""
    try:
        return [own for own in folder.iterdir() if is_unfinished(own.name)]
    except OSError:
        return []


def is_unfinished(name: str) -> bool:
    """Whether a name is that of something not yet whole.

    >>> is_unfinished(".page.html.0123abcd.part"), is_unfinished("page.html.part")
    (True, False)
    """
    return _UNFINISHED.fullmatch(name) is not None


def sweep(folder: Path) -> None:
    """Remove what processes that were killed left half-written."""
    for left in unfinished(folder):
        _remove_dead(left)


def locked(handle: int) -> bool:
    """Lock an open file for this process, unless another one has: then it is not.

    The lock ends with the process, however that ends; workers that outlive it do not hold it. Where
    the system or a network's file system has no such locks, everybody is told that it is.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


@contextmanager
def alone(folder: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep others of this machine out of a folder, threads too, where the system has such locks.

    Not to be asked for again by who has it: that would wait for itself.
    """
    with _handle_of(folder) as handle:
        if handle is not None and _taken(handle) is False:
            waiting()
            _taken(handle, wait=True)
        yield


@contextmanager
def dead(folder: Path) -> Iterator[bool]:
    """Whether the process that made an unfinished folder is gone; in here none takes it up."""
    with _handle_of(folder) as handle:
        yield handle is not None and _taken(handle) is True


def _remove_dead(left: Path) -> None:
    with dead(left) as gone:
        if gone:
            _remove(left)


def _remove(part: Path) -> None:
    if not (part / KEPT).exists():
        shutil.rmtree(part, ignore_errors=True)


def _new_part(folder: Path, start: str) -> tuple[Path, int | None]:
    """A new folder, and the handle that locks it; whoever tidies up may be a moment faster."""
    for _ in range(100):
        part = folder / f"{start}{secrets.token_hex(4)}.part"
        part.mkdir()
        handle = _opened(part)
        free = handle is None or _taken(handle) is not False
        if free and part.exists():
            return part, handle
        if handle is not None:
            os.close(handle)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder))


@contextmanager
def _handle_of(folder: Path) -> Iterator[int | None]:
    handle = _opened(folder)
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def _opened(folder: Path) -> int | None:
    """A handle to lock a folder by, which leaves no lock file behind; None if there is none."""
    try:
        import fcntl  # noqa: F401  (without it nothing could be done with the handle)

        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # a pipe would be waited for
    except (ImportError, OSError):
        return None


def _taken(handle: int, wait: bool = False) -> bool | None:
    """Lock an open folder: not if another has it; None where a file system knows no locks."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
