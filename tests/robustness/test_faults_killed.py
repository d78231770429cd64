"""A process that is killed at any moment leaves what was there or what it made, and no mixture."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.faults import command, forked, inside, kills_at, mostly_swept
from tests.helpers.shell import run
from torch import nn

import fpgm
from fpgm.utils import replace_files as together
from fpgm.utils import run_files as res
from fpgm.utils.atomic_io import BACKUP, is_unfinished, remove_leftovers, temp_dir, write_text
from fpgm.workflow.pruned_folder import write_pruned

X = torch.zeros(1, 1, 8, 8)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether bytes are on the disk or on their way there matters when power fails, not here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def seen(folder: Path) -> dict[str, bytes | None]:
    """What lies in a folder, but for what is unfinished."""
    return {
        name: content
        for name, content in inside(folder).items()
        if not any(map(is_unfinished, Path(name).parts))
    }


def every_moment(folder: Path, action: Callable[[], Any], check: Callable[[int], None]) -> int:
    """Kill an action before its first, second, … change to a folder, until it comes to its end."""
    for number in range(1, 200):
        with forked(action, kills_at(number, folder)) as code:
            assert code in (0, -9)
            check(number)
            if code == 0:
                return number
    raise AssertionError("it has no end")


def test_a_file_is_the_old_or_the_new(tmp_path: Path) -> None:
    file = tmp_path / "it.txt"
    write_text(file, "old")
    result = set()

    def check(number: int) -> None:
        result.add(file.read_text())

    moments = every_moment(tmp_path, lambda: write_text(file, "new"), check)
    assert moments > 5
    assert result == {"old", "new"}
    write_text(file, "newer")
    assert inside(tmp_path) == {"it.txt": b"newer"}  # and nothing else


def made() -> nn.Module:
    """So small that writing it is hardly more than the changes to the disk."""
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


class Work:
    """Two sets of results for the same folder."""

    def __init__(self, place: Path) -> None:
        self.place = place
        net = made()
        self.made = fpgm.plan(net, X, rate=0.4)
        self.small = fpgm.compact(net, self.made)
        self.about = {"format": 1, "model": "digits", "weights": None, "original_sha256": "",
                      "input": [1, 1, 8, 8]}  # fmt: skip

    def write(self, which: str, *beside: str) -> None:
        small = copy.deepcopy(self.small)
        with torch.no_grad():
            next(small.parameters()).fill_(len(which))
        texts = {name: json.dumps(which) for name in beside}
        results = {**self.about, "which": which}
        write_pruned(self.place, small, self.made, results, texts, force=True)

    def whole(self) -> str | None:
        """Which of both is there; None if neither is."""
        if not self.place.exists():
            return None
        result = str(res.read_results(self.place)["which"])
        small = fpgm.load(self.place / res.SMALL, made)
        assert float(next(small.parameters()).detach().flatten()[0]) == len(result)
        names = set(seen(self.place)) - {res.SMALL, res.PLAN, res.RESULTS}
        assert names == {"old": {res.BENCH, res.ANALYSIS}, "newer": {res.ANALYSIS}}[result]
        assert json.loads((self.place / res.ANALYSIS).read_text()) == result
        return result


def test_results_appear_all_at_once(tmp_path: Path) -> None:
    work = Work(tmp_path / "place")
    result = []

    def check(number: int) -> None:
        result.append(work.whole())
        shutil.rmtree(work.place, ignore_errors=True)

    every_moment(tmp_path, lambda: work.write("newer", res.ANALYSIS), check)
    assert result[0] is None
    assert result[-1] == "newer"
    assert {*result} == {None, "newer"}
    assert not list(tmp_path.iterdir())  # the last run removed what those before had left


def test_results_are_replaced_all_at_once(tmp_path: Path) -> None:
    """Even where the old ones have a file that the new ones have not."""
    work = Work(tmp_path / "place")
    result = []

    def check(number: int) -> None:
        result.append(work.whole())
        assert not list(work.place.glob(".*"))  # whoever reads a folder tidies up
        work.write("old", res.ANALYSIS, res.BENCH)

    work.write("old", res.ANALYSIS, res.BENCH)
    moments = every_moment(tmp_path, lambda: work.write("newer", res.ANALYSIS), check)
    assert moments > 20
    assert {*result} == {"old", "newer"}


@pytest.mark.sweep
def test_going_back_may_be_killed_too(tmp_path: Path) -> None:
    work = Work(tmp_path / "place")
    work.write("old", res.ANALYSIS, res.BENCH)
    marks = 0
    for number in range(1, 100):
        with forked(lambda: work.write("newer", res.ANALYSIS), kills_at(number, tmp_path)) as code:
            if code == 0:
                break
        marked = [item.parent for item in work.place.glob(".*/out")]
        if any((part / BACKUP).exists() for part in marked):  # the new ones are half in
            marks += 1
            every_moment(tmp_path, lambda: res.restore_interrupted(work.place), lambda _: None)
            assert work.whole() == "old"
        work.write("old", res.ANALYSIS, res.BENCH)
    assert marks > 2


def test_backups_to_restore_are_not_removed(tmp_path: Path) -> None:
    """Whoever writes there next removes leftovers: these are all there is of the old results."""
    work = Work(tmp_path / "place")
    work.write("old", res.ANALYSIS, res.BENCH)
    for number in range(20, 100):  # to write the new ones takes more changes than that
        with forked(lambda: work.write("newer", res.ANALYSIS), kills_at(number, tmp_path)) as code:
            assert code == -9
        if list(work.place.glob(".*/kept/*")):
            break
    with temp_dir(work.place, "results"):
        remove_leftovers(work.place)
    assert work.whole() == "old"


def test_a_replacement_that_cannot_be_undone_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a second Ctrl-C: the next process to look goes back."""
    work = Work(tmp_path / "place")
    work.write("old", res.ANALYSIS, res.BENCH)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(together, "_BACKED_UP", "nowhere/out")  # where nothing can be marked
        patch.setattr(together, "_undo", stopped)
        with pytest.raises(KeyboardInterrupt):
            work.write("newer", res.ANALYSIS)
    assert not (work.place / res.RESULTS).exists()
    assert work.whole() == "old"


def test_what_others_are_at_is_not_removed(tmp_path: Path) -> None:
    with temp_dir(tmp_path, "it") as first:
        (first / "half").touch()
        with temp_dir(tmp_path, "it") as second:
            assert first.exists()
            remove_leftovers(tmp_path)
            assert first.exists()
            assert second.exists()
    assert not list(tmp_path.iterdir())


def test_foreign_files_are_not_removed(tmp_path: Path) -> None:
    """Other programs call their unfinished files so too; and a pipe is not waited for."""
    (tmp_path / ".it.part").mkdir()
    (tmp_path / ".it.txt.part").mkdir()
    (tmp_path / ".it.txt.0123abcd.part").write_text("a file")
    os.mkfifo(tmp_path / ".it.txt.4567abcd.part")
    before = sorted(tmp_path.iterdir())
    write_text(tmp_path / "it.txt", "new")
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "it.txt"])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small"
    run("prune", "digits", "--rate", 0.4, "--out", folder)
    return folder


LOOK = ("--data", "digits", "--images", 64)


def commands(small: Path, place: Path) -> dict[str, tuple[object, ...]]:
    return {
        "prune": ("prune", "digits", "--rate", 0.4, "--out", place / "it"),
        "report": ("report", small, "--out", place / "it"),
        "sensitivity": ("sensitivity", "digits", *LOOK, "--no-accuracy", "--no-trials",
                        "--out", place / "it"),
        "export": ("export", small, "--to", "torchscript", "--out", place / "it"),
        "bench": ("bench", small, "--backend", "eager", "--seconds", 0.02, "--keep"),
        "analyze": ("analyze", "digits", "--figures", place / "it"),
        "compare": ("compare", "digits", *LOOK, "--test", 50, "--macs", 0.5, "--methods", "l2",
                    "--out", place / "it"),
    }  # fmt: skip


@pytest.mark.parametrize("name", mostly_swept(commands(Path(), Path()), ("prune", "compare")))
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_after_a_kill_the_same_command_succeeds(
    name: str, number: int, tmp_path: Path, small: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(small, copied)
    args = commands(copied, tmp_path)[name]
    ended = command(*args, before=kills_at(number, tmp_path))
    assert ended.code == -9
    assert set(seen(tmp_path)) - {"it", "copied"} <= {f"copied/{n}" for n in seen(small)}
    ended = command(*args)
    assert (ended.code, ended.err) == (0, "")
    assert not list(tmp_path.rglob("*.part"))
