"""Atomic writes: a file is complete or does not exist.

It is written in a temporary folder next to its destination. That folder is locked while the process
lives, so the next process removes what a killed one left, and does not touch what others are
writing.
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
from fpgm.utils.file_lock import LOCK_NAME, ProcessLock
from fpgm.utils.safe_read import regular_file_size
from fpgm.utils.text import reason

BACKUP = "kept"
"""In a temporary folder, the old files that must be restored before it may be removed."""
_MAX_NAME = 40
"""Characters of a file's name that its temporary folder's name repeats."""
_TEMP_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.part", re.DOTALL)


def file_sha256(path: Path) -> str:
    """Compute the SHA-256 of a file's bytes."""
    return file_digest(path, hashlib.sha256())


def file_digest(path: Path, digest: hashlib._Hash) -> str:
    """Hash a file's bytes with a `hashlib` object."""
    regular_file_size(path)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write; it replaces `path` once it is complete on disk.

    Through a link, the file it points to is replaced, not the link. Its permissions are the usual
    ones. A device or a pipe is refused.
    """
    target = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        regular_file_size(target)
    with temp_dir(target.parent, target.name) as folder:
        part = folder / "part"
        part.touch()
        mode = part.stat().st_mode
        yield part
        with part.open("rb+") as stream:
            os.fsync(stream.fileno())
        part.chmod(mode)  # safetensors makes its files unreadable for others
        part.replace(target)


def atomic_write_stream(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file through `write`, atomically."""
    with atomic_write(path) as part, part.open("wb") as stream:
        write(stream)


def write_text(path: Path, text: str) -> None:
    """Write a text atomically.

    File names that are not valid text, which file systems allow, are written as escapes that JSON
    supports.
    """
    content = text.encode(errors="backslashreplace")
    atomic_write_stream(path, lambda stream: stream.write(content))


@contextmanager
def explain_write_errors(file: Path) -> Iterator[None]:
    """Turn an OSError into a FileError that names the file and the reason."""
    try:
        yield
    except FileError:  # already has the file and the reason
        raise
    except OSError as error:
        raise FileError(f"{file} cannot be written: {reason(error)}.") from error


@contextmanager
def create_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; if the body fails, remove the new ones again."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):  # it was not created, or is no longer empty
                path.rmdir()
        raise


@contextmanager
def temp_dir(folder: Path, name: str) -> Iterator[Path]:
    """Create a temporary folder in `folder` for the future file `name`; remove it at the end."""
    start = f".{name[:_MAX_NAME]}"
    for left in list_unfinished(folder):
        if left.name.startswith(f"{start}."):
            remove_abandoned(left)
    part, lock = _make_temp_dir(folder, start)
    try:
        yield part
    finally:
        _remove_temp_dir(part, lock)


def list_unfinished(folder: Path) -> list[Path]:
    """List the temporary folders that processes are writing or left when they were killed."""
    try:
        return [path for path in folder.iterdir() if is_unfinished(path.name)]
    except OSError:
        return []


def is_unfinished(name: str) -> bool:
    """Return whether a name is that of a temporary folder or a lock.

    >>> is_unfinished(".page.html.0123abcd.part"), is_unfinished("page.html.part")
    (True, False)
    """
    return name == LOCK_NAME or _TEMP_NAME.fullmatch(name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove incomplete files of killed processes."""
    for left in list_unfinished(folder):
        remove_abandoned(left)


@contextmanager
def exclusive_lock(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep other processes and threads out of a folder, where its file system has locks.

    It is not reentrant: taking it twice would wait forever.
    """
    lock = ProcessLock(folder / LOCK_NAME)
    if folder.is_dir():
        with suppress(OSError):  # nobody can write to a read-only folder
            if lock.acquire() is False:
                on_wait()
                lock.acquire(wait=True)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def lock_abandoned(folder: Path) -> Iterator[bool]:
    """Lock a temporary folder if its process is gone; yield whether it was locked."""
    lock = ProcessLock(folder / LOCK_NAME)
    try:
        yield _acquire_abandoned(folder, lock)
    finally:
        lock.release()


def _acquire_abandoned(folder: Path, lock: ProcessLock) -> bool:
    try:
        return folder.is_dir() and lock.acquire() is True
    except OSError:
        return False


def remove_abandoned(left: Path) -> None:
    """Remove a temporary folder if its process is gone and left no backup in it."""
    lock = ProcessLock(left / LOCK_NAME)
    if _acquire_abandoned(left, lock):
        _remove_temp_dir(left, lock)


def _remove_temp_dir(part: Path, lock: ProcessLock) -> None:
    """Rename a folder so that nobody locks it, remove it, and release its lock."""
    if (part / BACKUP).exists():
        lock.release()
        return
    renamed = part.with_name(_make_temp_name(part.name.rsplit(".", 2)[0]))
    try:
        part.rename(renamed)
    except OSError:  # Windows cannot rename a folder with an open file in it
        lock.release(unlink=False)
        with suppress(OSError):
            part.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)
    lock.release(unlink=False)


def _make_temp_dir(folder: Path, start: str) -> tuple[Path, ProcessLock]:
    """Create a folder and lock it; before that, another process may consider it abandoned."""
    for _ in range(100):
        part = folder / _make_temp_name(start)
        part.mkdir()
        lock = ProcessLock(part / LOCK_NAME)
        try:
            if lock.acquire() is not False and part.exists():
                return part, lock
        except OSError:
            if part.exists():
                with suppress(OSError):
                    part.rmdir()
                raise
        lock.release(unlink=False)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder))


def _make_temp_name(start: str) -> str:
    return f"{start}.{secrets.token_hex(4)}.part"
