"""What `print(plan)` says about cost that cannot be removed, hard pruning and norms."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.shell import run
from torch import nn

import fpgm
from fpgm.pruning.plan import Group
from fpgm.utils.folded_rows import fold_rows

FEW = "few networks recover from: limit the rates with rates= or ignore= (--rates, --ignore)."


class Block(nn.Module):
    """Half of a transformer's block, on a stream that a norm over channels reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.fc2(self.fc1(self.norm(x)).relu())
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(self.stem(x))
        return out


X = torch.randn(2, 8)


def test_fixed_cost_is_that_of_operators_without_a_prunable_channel() -> None:
    plan = fpgm.plan(Net(), X, rate=0.5)
    per_input = 8 * 16  # the stem; every other layer reads or writes a hidden layer
    assert plan.macs_frozen == 2 * per_input
    assert plan.macs_before == 2 * (per_input + 4 * 2 * 16 * 64)
    assert "\nfixed  1.5% of the MACs: none of their channels can be removed\n" in str(plan)
    assert fpgm.Plan.from_json(plan.to_json()) == plan


def test_nothing_is_said_where_no_cost_is_fixed() -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    plan = fpgm.plan(net, X, rate=0.5)
    assert plan.macs_frozen == 0
    assert "fixed" not in str(plan)


def test_ignored_layers_are_fixed_cost_too() -> None:
    plan = fpgm.plan(Net(), X, rate=0.5, ignore=["blocks.0.fc1"])
    assert plan.macs_frozen == 2 * (8 * 16 + 2 * 16 * 64)


def test_like_lines_are_folded() -> None:
    text = str(fpgm.plan(Net(), X, rate=0.5))
    assert "\nblocks.{0..3}.fc1  1       64 → 32  50%\n" in text
    assert "\nfrozen stem, blocks.{0..3}.fc2 (80 channels): statistics over " in text


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["a.0.b", "a.1.b"], ["a.0.b", "a.1.b"]),  # two are no list
        (["a.0.b", "a.2.b", "a.5.b"], ["a.{0,2,5}.b"]),
        (["2.x.0", "2.x.1", "2.x.2", "2.x.3"], ["2.x.{0..3}"]),  # the two 2 are different places
        (["a0", "a1", "a2"], ["a0", "a1", "a2"]),  # part of a name, not an index
        (["a.0 in b.a.0", "a.1 in b.a.1", "a.2 in b.a.2"],) * 2,
        (["a.0 in a.0.n", "a.1 in a.1.n", "a.2 in a.2.n"], ["a.{0..2} in a.{0..2}.n"]),
    ],
)
def test_folding(names: list[str], folded: list[str]) -> None:
    assert fold_rows([(name,) for name in names]) == [(name,) for name in folded]


def test_rows_with_other_numbers_are_not_folded() -> None:
    rows = [("a.0", "8 → 4"), ("a.1", "8 → 2"), ("a.2", "8 → 4"), ("a.3", "8 → 4")]
    assert fold_rows(rows) == [("a.{0,2,3}", "8 → 4"), ("a.1", "8 → 2")]


def test_a_group_that_loses_most_of_its_units_is_warned_of() -> None:
    groups = (Group("a", ("a",), 10, 3), Group("b", ("b",), 10, 2), Group("c", ("c",), 10, 1))
    plan = fpgm.Plan("", {}, (), groups=groups)
    line = f"\nWARNING 2 groups lose more than 70% of the units (c 90%, b 80%), which {FEW}"
    assert line in str(plan)
    single = fpgm.Plan("", {}, (), groups=groups[:2])
    assert "\nWARNING A group loses more than 70% of the units (b 80%), which" in str(single)
    assert "WARNING" not in str(fpgm.Plan("", {}, (), groups=groups[:1]))


def test_approximate_is_suggested_where_norms_freeze_much() -> None:
    hint = "\nhint   Norms over channels freeze 24% of all channels. approximate=True (--approxi"
    assert hint in str(fpgm.plan(Net(), X, rate=0.5))
    assert "hint" not in str(fpgm.plan(Net(), X, rate=0.5, approximate=True))


def test_the_command_line_says_so_too(tmp_path: object) -> None:
    out, _ = run("prune", "digits", "--rate", 0.8, "--out", f"{tmp_path}/out")
    assert "\nWARNING: 6 groups lose more than 70% of the units (" in out
