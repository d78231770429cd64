"""Fetching CIFAR-10 killed or stopped at any moment: no half of it is taken for the whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.helpers.faults import Command, forked, kills_at, until
from tests.helpers.small_cifar10 import COUNT, FILES, Small

from fpgm.data import cifar10
from fpgm.data.cifar10_fetch import fetch
from fpgm.errors import FileError
from fpgm.utils.atomic_io import is_unfinished


def check_files(small: Small, root: Path) -> list[str]:
    """Names of the files that are there, each of them whole; with one less nothing is read."""
    folder = root / cifar10.FOLDER
    names = [item.name for item in folder.glob("*") if not is_unfinished(item.name)]
    for name in names:
        assert (folder / name).read_bytes() == small.official[name]
    if set(cifar10.SHA256) - set(names):
        with pytest.raises(FileError, match=r"does not exist: run fpgm data cifar10"):
            cifar10.read(root)
    return names


def test_killed_at_any_moment(small: Small, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt goes on from the one before, which was killed a little later."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    small.official_archive(root)
    results = set()
    for number in range(1, 200):
        with forked(lambda: fetch(root), kills_at(number, root)) as code:
            assert code in (0, -9)
        results.add(len(check_files(small, root)))
        if code == 0:
            break
    assert code == 0
    assert len(results) > 3
    assert small.is_in(root)  # and nothing beside


STOPS = """
import fpgm.data.cifar10 as cifar10, os, time
from pathlib import Path
cifar10.PER_BATCH, cifar10.SHA256 = {count}, {digests!r}
real, written = os.fsync, []
def slow(handle):
    written.append(handle)
    if len(written) == 3:
        Path({mark!r}).touch()
        time.sleep(600)
    real(handle)
os.fsync = slow
"""
"""The third file is written, but not yet in its place."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda item: item.name)
def test_the_command_is_ended_within_a_file(
    number: signal.Signals, small: Small, root: Path, tmp_path: Path
) -> None:
    small.official_archive(root)
    mark = tmp_path / "mark"
    code = STOPS.format(count=COUNT, digests=cifar10.SHA256, mark=str(mark))
    running = Command("data", "cifar10", "--root", root, before=code)
    until(mark.exists)
    running.send(number)
    ended = running.end()
    if number == signal.SIGINT:
        assert (ended.code, ended.line()) == (130, "stopped.")
        assert not list(root.rglob("*.part"))
    else:
        assert ended.code == -9
    assert len(check_files(small, root)) == 2
    again = Command("data", "cifar10", "--root", root, before=code.replace("== 3", "== 0")).end()
    assert (again.code, again.err) == (0, "")
    assert sorted(item.name for item in (root / cifar10.FOLDER).iterdir()) == FILES
