"""A folder of rows under faults: every row is whole or missing, and made once."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.helpers.faults import Command, Ended, inside, kills_at, until

from fpgm.utils.atomic_io import is_unfinished

ROW = """
import time
from pathlib import Path
from fpgm.paper.tables import TABLES, RowResult
from fpgm.paper.tables.quick_scale import QuickScale
def run_row(self, table, row, seed):
    with Path({log!r}).open("a") as log:
        log.write(row.key + "\\n")
    while Path({log!r}).with_name("hold " + row.key).exists():
        time.sleep(0.01)
    return RowResult({{key: 50.0 for key in TABLES[table].keys}}, 0.1, "faked")
QuickScale.run = run_row
"""
"""Replaces the computation of a row, which waits while a file exists."""
FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
"""


class Rows:
    """The command that makes two rows, and what came of it."""

    def __init__(self, folder: Path) -> None:
        self.log, self.out = folder / "log", folder / "out"

    def start(self, before: str = "") -> Command:
        return Command(
            "reproduce", "ablations", "--rows", "interval-[12]", "--out", self.out,
            before=ROW.format(log=str(self.log)) + before,
        )  # fmt: skip

    def hold(self, row: str) -> Path:
        file = self.log.with_name(f"hold {row}")
        file.touch()
        return file

    def begun(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def written(self) -> dict[str, dict[str, float]]:
        """Figures by row; nothing but whole rows may be there."""
        files = self.out.glob("ablations-quick/[!.]*")
        return {item.name: json.loads(item.read_text())["ours"] for item in files}

    def check_whole(self, ended: Ended) -> None:
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.count("faked") == 2
        assert sorted(self.written()) == ["interval-1.0.json", "interval-2.0.json"]
        assert all(set(row.values()) == {50.0} for row in self.written().values())
        hidden = [item for item in self.out.rglob(".*") if not is_unfinished(item.name)]
        assert hidden == []  # no claim is left; what a kill left of a row that is whole may be


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path)


def test_a_row_that_finds_no_space(rows: Rows) -> None:
    line = rows.start(FULL).end().line()
    file = rows.out / "ablations-quick" / "interval-1.0.json"
    assert line == f"{file} cannot be written: File too large."
    assert inside(rows.out) == {"ablations-quick": None}
    rows.check_whole(rows.start().end())


def test_a_process_that_is_stopped_within_a_row(rows: Rows) -> None:
    hold = rows.hold("interval-2")
    running = rows.start()
    until(lambda: len(rows.begun()) == 2)
    running.send(signal.SIGINT)
    ended = running.end()
    assert (ended.code, ended.err) == (130, "fpgm: stopped; run the same command to continue.\n")
    assert list(rows.written()) == ["interval-1.0.json"]
    hold.unlink()
    rows.check_whole(rows.start().end())
    assert rows.begun() == ["interval-1", "interval-2", "interval-2"]


def test_a_process_that_is_killed_within_a_row(rows: Rows) -> None:
    hold = rows.hold("interval-2")
    running = rows.start()
    until(lambda: len(rows.begun()) == 2)
    running.send(signal.SIGKILL)
    assert running.end().code == -9
    assert list(rows.written()) == ["interval-1.0.json"]
    hold.unlink()
    rows.check_whole(rows.start().end())
    assert rows.begun() == ["interval-1", "interval-2", "interval-2"]


@pytest.mark.sweep
def test_a_process_that_is_killed_at_any_moment(tmp_path: Path) -> None:
    for number in range(1, 100):
        rows = Rows(tmp_path / str(number))
        rows.log.parent.mkdir()
        ended = rows.start(kills_at(number, rows.out)).end()
        assert all(set(row.values()) == {50.0} for row in rows.written().values())
        rows.check_whole(rows.start().end())
        if ended.code == 0:
            break
        assert ended.code == -9
    assert number > 20


def test_two_processes_make_every_row_once(rows: Rows) -> None:
    hold = rows.hold("interval-1")
    first = rows.start()
    until(lambda: rows.begun() == ["interval-1"])
    second = rows.start().end()
    assert (second.code, second.err) == (0, "")
    assert "interval-1, seed 0, is being computed by another process." in second.out
    assert list(rows.written()) == ["interval-2.0.json"]
    hold.unlink()
    rows.check_whole(first.end())
    assert rows.begun() == ["interval-1", "interval-2"]


def test_an_incomplete_row_is_named(rows: Rows) -> None:
    rows.check_whole(rows.start().end())
    file = rows.out / "ablations-quick" / "interval-1.0.json"
    file.write_bytes(file.read_bytes()[:100])
    assert rows.start().end().line().startswith(f"{file} cannot be read: ")
    file.unlink()
    rows.check_whole(rows.start().end())
