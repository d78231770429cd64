"""Two processes at one place: one of them says so, or what is there is whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.helpers.faults import Command, Ended, command, until
from tests.helpers.shell import run

from fpgm.latency.lookup_table import FORMAT
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.utils import replace_files as together
from fpgm.utils.atomic_io import BACKUP, exclusive_lock

LOOK = ("--data", "digits", "--images", 32)
PRUNE = ("prune", "digits", "--out")

MEET = """
import fpgm.workflow.pruned_folder as res, os, time
from pathlib import Path
real = res.save
def slow(*args):
    real(*args)
    Path({place!r}, str(os.getpid())).touch()
    while len(os.listdir({place!r})) < 2:
        time.sleep(0.01)
res.save = slow
"""
"""Nobody moves anything into its place before both are about to."""


def both(place: Path, *extra: object) -> list[Ended]:
    """Two prunings to the same folder, at different rates."""
    gate = place.with_name("gate")
    gate.mkdir()
    code = MEET.format(place=str(gate))
    running = [Command(*PRUNE, place, "--rate", rate, *extra, before=code) for rate in (0.25, 0.5)]
    return [item.end() for item in running]


def check(place: Path, ended: list[Ended], rates: tuple[float, ...] = (0.25, 0.5)) -> None:
    done = [rate for item, rate in zip(ended, rates, strict=True) if item.code == 0]
    output = json.loads((place / "results.json").read_text())
    assert output["asked"]["rate"] in done
    run("verify", place)
    assert not list(place.parent.rglob("*.part"))


@pytest.mark.parametrize("there", [False, True])
def test_new_results(there: bool, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if there:
        place.mkdir()
    ended = both(place)
    assert sorted(item.code for item in ended) == [0, 2]
    why = "is not empty: choose another --out" if there else "Directory not empty"
    assert why in next(item for item in ended if item.code).line()
    check(place, ended)


def test_results_that_both_replace(tmp_path: Path) -> None:
    place = tmp_path / "place"
    run(*PRUNE, place, "--rate", 0.4)
    ended = both(place, "--force")
    assert [item.code for item in ended] == [0, 0]
    check(place, ended)


def test_a_sensitivity_that_both_measure(tmp_path: Path) -> None:
    args = ("sensitivity", "digits", *LOOK, "--no-trials", "--no-accuracy", "--out")
    running = [Command(*args, tmp_path / "it.json") for _ in range(2)]
    ended = [item.end() for item in running]
    assert [item.code for item in ended] == [0, 0]
    assert ended[0].out == ended[1].out
    assert Sensitivity.read(tmp_path / "it.json").complete
    assert [item.name for item in tmp_path.iterdir()] == ["it.json"]


@pytest.mark.sweep
def test_times_that_both_keep(tmp_path: Path) -> None:
    env = {**os.environ, "FPGM_CACHE": str(tmp_path / "cache")}
    alone = "from fpgm.utils import machine_load; machine_load._busy_seconds = lambda: None"
    running = [
        Command(*PRUNE, tmp_path / str(n), "--latency", 0.1, env=env, before=alone)
        for n in range(2)
    ]
    assert [item.end().code for item in running] == [0, 0]
    (file,) = (tmp_path / "cache" / "latency").iterdir()
    output = json.loads(file.read_text())
    assert output["format"] == FORMAT
    assert all(seconds > 0 for seconds in output["seconds"].values())


def test_a_comparison_that_both_make(tmp_path: Path) -> None:
    """Whoever comes second to a row says so, and goes on when called again."""
    args = ("compare", "digits", *LOOK, "--test", 32, "--macs", 0.5, "--methods", "l2",
            "--out", tmp_path / "rows")  # fmt: skip
    running = [Command(*args) for _ in range(2)]
    ended = [item.end() for item in running]
    assert 0 in [item.code for item in ended]
    for item in ended:
        assert item.code == 0 or "cannot be written" in item.line()
    assert command(*args).code == 0
    run("report", tmp_path / "rows" / "l2")


@pytest.mark.sweep
def test_a_folder_that_is_being_replaced_waits(tmp_path: Path) -> None:
    """The lock is the folder's own: nothing is left behind by it."""
    place = tmp_path / "place"
    run(*PRUNE, place, "--rate", 0.4)
    mark = tmp_path / "mark"
    first = Command(
        *PRUNE, place, "--rate", 0.25, "--force",
        before=f"""
import fpgm.utils.replace_files as together, time
from pathlib import Path
real = together._move_files
def slow(*args):
    Path({str(mark)!r}).touch()
    time.sleep(2)
    real(*args)
together._move_files = slow
""",
    )  # fmt: skip
    until(mark.exists)
    second = command(*PRUNE, place, "--rate", 0.5, "--force")
    assert [first.end().code, second.code] == [0, 0]
    assert json.loads((place / "results.json").read_text())["asked"]["rate"] == 0.5
    run("verify", place)


def test_going_back_takes_turns_with_replacing(tmp_path: Path) -> None:
    """Or old files that one brings back would lie among the new ones of another."""
    kept = tmp_path / ".results.0123abcd.part" / BACKUP
    kept.mkdir(parents=True)
    (kept / "results.json").write_text("old")
    begun = Event()

    def look() -> None:
        begun.set()
        together.recover_interrupted_write(tmp_path, ("results.json",))

    other = Thread(target=look)
    with exclusive_lock(tmp_path):
        other.start()
        assert begun.wait(10)
        other.join(0.2)
        assert other.is_alive()
        assert list(kept.iterdir())
    other.join(10)
    assert [item.name for item in tmp_path.iterdir()] == ["results.json"]
