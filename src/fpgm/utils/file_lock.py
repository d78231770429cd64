"""Locks between processes and threads, each with its own file.

The operating system manages them through `filelock`: a lock ends with its process, however that
ends, and workers forked meanwhile do not keep it.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import filelock

LOCK_NAME = ".fpgm.lock"
"""The file that locks its folder."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of file systems without locks, such as some network file systems."""


class ProcessLock:
    """An exclusive lock on `file`, which is created for it and removed on release."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = filelock.FileLock(file, mode=0o666, thread_local=False, fallback_to_soft=False)

    def acquire(self, *, wait: bool = False) -> bool | None:
        """Take the lock: False if another has it, None if this file system has no locks.

        OSError if the file cannot be created.

        Args:
            wait: wait for as long as another has it.
        """
        try:
            self._lock.acquire(blocking=wait)
        except filelock.Timeout:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._unlink()
            return None
        return True

    def release(self, *, unlink: bool = True) -> None:
        """Release the lock; nothing happens if it is not held.

        Args:
            unlink: remove the file. It is removed while locked, so that others notice.
        """
        if not self._lock.is_locked:
            return
        if unlink:
            self._unlink()
        self._lock.release()

    def _unlink(self) -> None:
        with suppress(OSError):  # on Windows filelock removes it, once it is released
            self.file.unlink()
