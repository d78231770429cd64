"""A lock has one owner, ends with its process, and leaves no file behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.helpers.faults import until

from fpgm.utils import atomic_io
from fpgm.utils.file_lock import LOCK_NAME, ProcessLock

HOLD = """
import os, sys, time
from pathlib import Path
from fpgm.utils.file_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]))
assert lock.acquire() is True
child = os.fork() if sys.argv[2] == "fork" else 1
if child:
    print(child, flush=True)
time.sleep(60)
"""

unix = pytest.mark.skipif(os.name == "nt", reason="patches fcntl, forks or kills")


def hold(file: Path, how: str = "") -> tuple[subprocess.Popen[str], int]:
    """Start a process that holds a lock; return it and its child's id."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file), how], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    return other, int(other.stdout.readline())


def test_only_one_lock_holds_the_file(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    first, second = ProcessLock(file), ProcessLock(file)
    assert first.acquire() is True
    assert second.acquire() is False
    second.release()
    assert second.acquire() is False
    first.release()
    assert not file.exists()
    assert second.acquire() is True
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_another_thread_waits(tmp_path: Path) -> None:
    first, second = (ProcessLock(tmp_path / "lock") for _ in range(2))
    first.acquire()
    other = threading.Thread(target=lambda: second.acquire(wait=True))
    other.start()
    other.join(0.2)
    assert other.is_alive()
    first.release()
    other.join(10)
    assert first.acquire() is False
    second.release()
    assert first.acquire() is True
    first.release()


def test_a_killed_process_has_it_no_longer(tmp_path: Path) -> None:
    other, _ = hold(tmp_path / "lock")
    lock = ProcessLock(tmp_path / "lock")
    assert lock.acquire() is False
    other.kill()
    other.communicate()
    assert lock.acquire() is True
    lock.release()
    assert list(tmp_path.iterdir()) == []


@unix
def test_a_forked_worker_does_not_keep_it(tmp_path: Path) -> None:
    other, child = hold(tmp_path / "lock", "fork")
    lock = ProcessLock(tmp_path / "lock")
    try:
        assert lock.acquire() is False
        other.kill()
        other.wait()
        until(lambda: lock.acquire() is True, 5)
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        other.communicate()


@unix
def test_a_lock_that_its_owner_removes_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third process would make another file of that name, and hold its lock too."""
    import fcntl

    file, real = tmp_path / "lock", fcntl.flock
    calls: list[int] = []

    def flock(handle: int, how: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            file.unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = ProcessLock(file)
    assert lock.acquire(wait=True) is True
    assert file.exists()
    assert len(calls) == 2
    lock.release()


@unix
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work goes on, and nothing of others is taken for a dead process's."""
    import fcntl

    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    left = tmp_path / ".page.html.0123abcd.part"
    left.mkdir()
    monkeypatch.setattr(fcntl, "flock", flock)
    assert ProcessLock(tmp_path / "lock").acquire() is None
    with atomic_io.exclusive_lock(tmp_path):
        atomic_io.write_text(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "new"
    atomic_io.remove_leftovers(tmp_path)
    assert {item.name for item in tmp_path.iterdir()} == {left.name, "page.html"}


def test_a_place_for_no_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        ProcessLock(tmp_path / "file" / LOCK_NAME).acquire()
    with atomic_io.exclusive_lock(tmp_path / "nothing"):
        assert not (tmp_path / "nothing").exists()
