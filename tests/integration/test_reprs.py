"""What a Python prompt and a notebook show: the outcome in one line, and a small escaped table."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import fpgm
from fpgm.latency.benchmark import Bench, BenchRow, ModelTiming
from fpgm.pruning.plan import Frozen, Group, Latency
from fpgm.recovery.api import Recovery
from fpgm.recovery.layer_solver import SolvedLayer
from fpgm.utils.html_table import MAX_ROWS, html_table

X = torch.zeros(1, 3, 8, 8)
EVIL = "<script>alert(1)</script>\n\x1b[2J"

PLAN = fpgm.Plan(
    "", {}, (),
    groups=(Group("conv1", ("conv1",), 16, 8), Group("conv2", ("conv2", "conv3"), 32, 24)),
    frozen=(Frozen(("head",), 10, "the model's output"),),
    macs_before=1000, macs_after=600, params_before=100, params_after=75,
)  # fmt: skip
CERTIFICATE = fpgm.Certificate(1.8e-13, 41.1, 2, 1e-8, "float64")
RECOVERY = Recovery("solve", (SolvedLayer("conv1", 0.5, 0.1, 1e-6),), 0.42, 0.00116, 128, 0, 0, 3.5)
FIRST = ModelTiming("original", 0.002, 0.01, 500.0, 1.0, 10, None)
SMALL = ModelTiming("small", 0.001, 0.01, 1000.0, 2.1, 5, None, 2.2, "2.1× faster; theory 2.2×")
BENCH = Bench((BenchRow("eager", 1, 2, (FIRST, SMALL)),), (), {}, {})


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            PLAN,
            (
                "Plan(MACs −40.0%, parameters −25.0%, 16 of 48 units in 2 groups removed, "
                "10 channels frozen)"
            ),
        ),
        (
            replace(PLAN, frozen=(), latency=Latency("eager", 1, 0.5, 0.4, 0.45, 2.0, 1.1)),
            (
                "Plan(MACs −40.0%, parameters −25.0%, 16 of 48 units in 2 groups removed, "
                "time −45.0% in eager)"
            ),
        ),
        (
            CERTIFICATE,
            "Certificate(ok: differs by 1.8e-13, tolerance 1e-08, over 2 inputs in float64)",
        ),
        (
            replace(CERTIFICATE, max_error=0.1, worst="output 0, channel 3"),
            (
                "Certificate(NOT ok: differs by 1.0e-01 at output 0, channel 3, tolerance 1e-08, "
                "over 2 inputs in float64)"
            ),
        ),
        (
            replace(CERTIFICATE, moved=0.0, exact=False),
            (
                "Certificate(nothing verified: differs by 1.8e-13, tolerance 1e-08, over 2 inputs "
                "in float64, approximate)"
            ),
        ),
        (replace(CERTIFICATE, problem="It fails."), "Certificate(NOT ok: It fails.)"),
        (RECOVERY, "Recovery(solve: output error 0.42 → 0.00116, 128 inputs, 3.5 s)"),
        (
            replace(RECOVERY, method=None, before=None, steps=7),
            (
                "Recovery(distillation: output error not compared, 128 inputs, 7 steps of "
                "distillation, 3.5 s)"
            ),
        ),
        (BENCH, "Bench(small 2.10× as fast as original (eager, batch 1, threads 2))"),
        (
            Bench((BenchRow("eager", 1, 2, (FIRST, SMALL), "busy"),), (), {}, {}),
            ("Bench(no reliable time: busy (eager, batch 1, threads 2))"),
        ),
        (
            Bench((BenchRow("eager", 8, 1, (FIRST,)),), (), {}, {}),
            "Bench(original 2 ms (eager, batch 8, threads 1))",
        ),
    ],
)
def test_the_outcome_in_one_line(value: Any, text: str) -> None:
    assert repr(value) == text


def test_a_pruner_reports_progress() -> None:
    pruner = fpgm.SoftPruner(net(), X, rate=0.5, align=1)
    assert repr(pruner) == "SoftPruner(soft, epoch 0: nothing zeroed yet)"
    assert "nothing zeroed yet" in pruner._repr_html_()
    pruner.step()
    assert pruner.plan is not None
    assert repr(pruner) == (
        "SoftPruner(soft, epoch 1: 4 of 8 units zeroed, MACs would fall by "
        f"{pruner.plan.macs_removed:.1%})"
    )
    pruner.compact()
    assert repr(pruner).endswith("; compacted and verified)")


def test_a_plan_of_a_large_network_is_still_one_line() -> None:
    plan = fpgm.plan(fpgm.models.resnet(56), torch.zeros(1, 3, 32, 32), rate=0.4)
    assert len(repr(plan)) < 150
    assert len(str(plan).splitlines()) < 20  # like lines are folded
    assert fpgm.Plan.from_json(plan.to_json()) == plan


class Tags(HTMLParser):
    """Which elements a page has, and whether all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)
        self.open.append(tag)
        assert not attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def evil_values() -> list[Any]:
    group = Group(EVIL, (EVIL,), 16, 8)
    figures = replace(SMALL, model=EVIL, verdict=EVIL)
    return [
        replace(PLAN, groups=(group,), frozen=(Frozen((EVIL,), 1, EVIL),), notes=(EVIL,)),
        replace(CERTIFICATE, worst=EVIL, notes=(EVIL,)),
        replace(CERTIFICATE, problem=EVIL),
        replace(RECOVERY, layers=(SolvedLayer(EVIL, 0.5, 0.1, None),), notes=(EVIL,)),
        Bench((BenchRow("eager", 1, 2, (FIRST, figures)),), (), {EVIL: EVIL}, {}),
    ]


@pytest.mark.parametrize("value", evil_values(), ids=lambda value: type(value).__name__)
def test_names_cannot_break_out_of_a_line_or_a_table(value: Any) -> None:
    assert repr(value).isprintable()
    tags = Tags(value._repr_html_())
    assert tags.open == []
    assert tags.names <= {"table", "caption", "tr", "th", "td", "p"}
    assert "<script>" in tags.text


def test_a_long_table_says_what_it_leaves_out() -> None:
    rows = [[str(number)] for number in range(MAX_ROWS + 3)]
    text = html_table("many", ["n"], rows)
    assert f"<td>{MAX_ROWS - 1}</td></tr><tr><td>… and 3 more</td>" in text
    assert "more" not in html_table("many", ["n"], rows[:MAX_ROWS])
