"""Long work is told in a log too, where nobody sees a bar."""

from __future__ import annotations

import pytest
from tests.helpers.shell import run

from fpgm.cli import _common as common

INSPECT = ("inspect", "resnet20", "--json")


def test_a_short_command_prints_nothing_else() -> None:
    assert run(*INSPECT)[1] == ""


def test_a_step_is_named_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "LOG_SECONDS", 0.0)
    out, err = run(*INSPECT)
    assert out.startswith("{")  # the log is beside it
    assert len(err.splitlines()) == 3


def test_lines_come_no_oftener_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 10.0, 31.0, 32.0, 62.0))
    said: list[str] = []
    monkeypatch.setattr(common.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(common.typer, "echo", lambda text, err: said.append(text))
    with common.LayerBar() as bar:
        for number in range(4):
            bar.show(f"layer{number}", number, 4)
    assert said == ["layer1 (1/4)", "layer3 (3/4)"]
