"""Files that are whole or not there, and known by their digest.

What is being written lies in a folder of its own beside its place, locked as long as the process
lives: so what a killed one left is told from what another is at, and removed by the next.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fpgm.errors import FileError
from fpgm.reading import ordinary
from fpgm.wording import reason

PART = ".part"
"""How the names of unfinished things end; they begin with a dot."""
_LONGEST = 40
"""Letters of a name that its unfinished folder has too: names have an end."""


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
        with suppress(OSError):  # what others have put there stays
            for own in new:
                own.rmdir()
        raise


@contextmanager
def aside(folder: Path, name: str) -> Iterator[Path]:
    """A folder in `folder`, to make in it what is to be called `name`; gone afterwards."""
    start = f".{name[:_LONGEST]}."
    for left in unfinished(folder):
        if left.name.startswith(start):
            _remove_dead(left)
    part, held = _taken(folder, start)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if held is not None:
            os.close(held)


def unfinished(folder: Path) -> list[Path]:
    """What processes are at in a folder, or left when they were killed."""
    try:
        return [own for own in folder.iterdir() if is_unfinished(own.name)]
    except OSError:
        return []


def is_unfinished(name: str) -> bool:
    """Whether a name is that of something not yet whole."""
    return name.startswith(".") and name.endswith(PART)


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
    """Keep other processes of this machine out of a folder, where the system has such locks."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)  # the folder itself: a lock file would stay behind
    except (ImportError, OSError):
        yield
        return
    try:
        with suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def dead(folder: Path) -> Iterator[bool]:
    """Whether the process that made an unfinished folder is gone; in here none takes it up."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _remove_dead(left: Path) -> None:
    if left.is_dir():
        with dead(left) as gone:
            if gone:
                shutil.rmtree(left, ignore_errors=True)
    else:
        with suppress(OSError):
            left.unlink()


def _taken(folder: Path, start: str) -> tuple[Path, int | None]:
    """A new folder, and the handle that locks it; whoever tidies up may be a moment faster."""
    for _ in range(100):
        part = folder / f"{start}{secrets.token_hex(4)}{PART}"
        part.mkdir()
        try:
            import fcntl

            handle = os.open(part, os.O_RDONLY)
        except ImportError:
            return part, None
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            continue
        except OSError:  # some network file systems know no locks
            pass
        if part.exists():
            return part, handle
        os.close(handle)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder))
