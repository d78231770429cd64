"""Measurements while other processes use the cores: noticed, reported, and not cached."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

import fpgm
from fpgm.cli._outcome import cost_changes, latency_line
from fpgm.latency import budget_search
from fpgm.latency.backends import BACKENDS
from fpgm.latency.lookup_table import LatencyTable
from fpgm.latency.speedup_summary import summarize
from fpgm.pruning.plan import Latency
from fpgm.report.headline import cards
from fpgm.report.run import Run
from fpgm.tracing.layer_calls import LayerSpec
from fpgm.utils import machine_load
from fpgm.utils.machine_load import MachineLoad

REAL = machine_load._busy_seconds
CONV = LayerSpec("conv", 1, (8, 8), 16, 16, (3, 3), (1, 1), (1, 1), (1, 1))


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores, of which others take one and a half."""
    seconds = count()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(
        machine_load, "_busy_seconds", lambda: (float(now := next(seconds)), 1.5 * now)
    )
    return


def test_load_is_described_in_one_phrase(crowd: None) -> None:
    watched = MachineLoad()
    assert watched.used_cores() == pytest.approx(1.5)
    assert watched.describe_contention(1) == "other processes used 1.5 of 2 cores"


@pytest.mark.parametrize(("others", "threads", "reported"), [
    (0.2, 2, False), (0.9, 1, False), (0.9, 2, True), (1.9, 1, True), (0.0, 4, False),
])  # fmt: skip
def test_only_where_cores_are_shared(
    others: float, threads: int, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    times = iter([(0.0, 0.0), (10.0, 10 * others)])
    monkeypatch.setattr(machine_load, "_busy_seconds", lambda: next(times))
    assert (MachineLoad().describe_contention(threads) is not None) == reported


def test_an_unknown_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "_busy_seconds", lambda: None)
    assert MachineLoad().describe_contention(8) is None


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_another_process_counts_and_this_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs meanwhile, a busy process adds about a core."""
    monkeypatch.setattr(machine_load, "_busy_seconds", REAL)
    results = REAL()
    assert results is not None
    started = MachineLoad()
    other = multiprocessing.get_context("spawn").Process(target=_spin, args=(30.0,))
    other.start()
    try:
        time.sleep(3)
        assert started.used_cores() > 0.2
    finally:
        other.kill()
        other.join()


def test_the_summary_reports_it_and_gives_no_other_reason() -> None:
    summary = summarize(
        1.0, 2.0, 0.0, lambda: ["odd widths"], "other processes used 1.5 of 2 cores"
    )
    assert summary == (
        "unreliable: other processes used 1.5 of 2 cores; measure again on an idle machine; "
        "theory 2.0×"
    )


def test_times_are_not_cached(crowd: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FPGM_CACHE", str(tmp_path))
    table = LatencyTable(BACKENDS["eager"], 1)
    assert table.seconds(CONV) > 0
    table.save()
    assert not table.file.exists()


class TestPlan:
    @pytest.fixture(autouse=True)
    def short(self, crowd: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fpgm.latency.budget_search.SECONDS", 0.05)

    def planned(self) -> fpgm.Plan:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        x = torch.randn(1, 3, 8, 8)
        return fpgm.plan(net, x, latency=0.2, backend="eager", threads=1)

    def test_a_plan_reports_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = Latency("eager", 1, 0.2, 0.2, 0.2, 1.0, 0.8)
        plan = fpgm.Plan("", {}, (), latency=times)
        monkeypatch.setattr(budget_search, "reach_budget", lambda *_: plan)
        plan = self.planned()
        (note,) = plan.notes
        assert plan.latency == replace(times, crowd="other processes used 1.5 of 2 cores")
        assert fpgm.Plan.from_json(plan.to_json()) == plan
        assert "; unreliable: other processes used 1.5 of 2 cores)" in str(plan)
        assert "time" not in repr(plan)
        assert "Latency" not in cost_changes(plan)  # not in the headline, but below it
        line = latency_line(plan.latency)
        assert line.endswith(" Unreliable: other processes used 1.5 of 2 cores.")
        (card,) = (c for c in cards(Run("a", plan=plan)) if c.name == "Latency")
        assert (card.value, card.tone) == ("unreliable", "plain")
        assert note == (
            "While times were measured, other processes used 1.5 of 2 cores: they may be wrong."
        )

    def test_an_unreachable_budget_mentions_the_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> fpgm.Plan:
            raise fpgm.RequestError("It cannot be reached.")

        monkeypatch.setattr(budget_search, "reach_budget", refuse)
        with pytest.raises(
            fpgm.RequestError, match=r"reached\. But other processes used 1\.5 of 2 cores"
        ):
            self.planned()


def test_a_bench_reports_it(crowd: None) -> None:
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3)).eval()
    x = torch.randn(1, 3, 16, 16)
    small = fpgm.prune(net, x, rate=0.5)
    (row,) = fpgm.bench([net, small], x, backends=["eager"], threads=[1], seconds=0.1).rows
    verdict = row.figures[1].verdict
    assert verdict is not None
    assert "unreliable: other processes used 1.5 of 2 cores" in verdict
    assert row.crowd == "other processes used 1.5 of 2 cores"
