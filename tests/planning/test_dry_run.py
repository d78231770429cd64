"""How much work planning does, and models whose own code refuses a part of it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm
from fpgm.models import build
from fpgm.planning import dry_run

X = torch.randn(2, 3, 8, 8)


class Summed(nn.Module):
    """A layer whose weight is a sum of two, as low-rank updates make it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(8, 8, 1, 1))
        self.delta = nn.Parameter(torch.randn(8, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.base + self.delta).relu()


def _count_isin(monkeypatch: pytest.MonkeyPatch, layers: int) -> int:
    calls = []
    isin = torch.isin
    with monkeypatch.context() as patch:
        patch.setattr(torch, "isin", lambda *args: (calls.append(1), isin(*args))[1])
        parts = [Summed() for _ in range(layers)]
        net = nn.Sequential(nn.Conv2d(3, 8, 1), *parts, nn.Conv2d(8, 4, 1))
        assert fpgm.plan(net, X, rate=0.5, align=1).cuts
    return len(calls)


def test_roles_of_summed_weights_take_time_in_proportion_to_the_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _count_isin(monkeypatch, 20) < 3 * _count_isin(monkeypatch, 10)


class Frozen(nn.Module):
    """A model whose `train` raises, with code that could tell the modes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.b = nn.Conv2d(8, 4, 1)
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu())
        return out

    def train(self, mode: bool = True) -> "Frozen":
        if mode:
            raise RuntimeError("frozen for inference")
        super().train(mode)
        return self


def test_a_model_that_refuses_train_mode_is_planned_with_a_note() -> None:
    plan = fpgm.plan(Frozen(), X, rate=0.5, align=1)
    assert plan.cuts
    assert any("frozen for inference" in note for note in plan.notes)


def test_a_dry_run_runs_with_values_only_where_values_may_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[bool] = []
    original = dry_run._dry_run

    def count(*args: Any, values: bool) -> Any:
        runs.append(values)
        return original(*args, values=values)

    monkeypatch.setattr(dry_run, "_dry_run", count)
    assert fpgm.plan(build("resnet20"), torch.zeros(1, 3, 32, 32), rate=0.4).cuts
    assert runs
    assert not any(runs)


class GroupNormInCode(nn.Module):
    """Normalizes in groups without a module that stores how many there are."""

    def __init__(self, per_group: int) -> None:
        super().__init__()
        self.per_group = per_group
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        groups = x.shape[1] // self.per_group if self.per_group else 4
        out: Tensor = self.b(F.group_norm(x, groups).relu())
        return out


def test_a_fixed_number_of_groups_keeps_the_channels_of_a_norm() -> None:
    with pytest.raises(fpgm.ModelError, match="the number of groups is fixed in the code"):
        fpgm.plan(GroupNormInCode(0), X, rate=0.5, align=1)
    for per_group, units in ((2, 8), (4, 4)):  # 4 is also the number of groups
        net = GroupNormInCode(per_group)
        plan = fpgm.plan(net, X, rate=0.5, align=1)
        assert [(group.units, group.kept) for group in plan.groups] == [(units, units // 2)]
        assert fpgm.verify(net, plan, X).ok


class Depthwise(nn.Module):
    """A depthwise convolution in code, with its number of groups in an attribute of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, 16)
        self.weight = nn.Parameter(torch.randn(16, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, padding=1, groups=getattr(self, self.name))


@pytest.mark.parametrize("name", ["own_groups", "expert_groups"])  # not a size per group
def test_the_number_of_groups_follows_under_any_name(name: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 1), Depthwise(name), nn.ReLU(), nn.Conv2d(16, 4, 1))
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert (name, 16, 8) in [(a.name, a.before, a.after) for a in plan.attributes]
    assert fpgm.verify(net, plan, X).ok


class WrittenIntoZeros(nn.Module):
    """Two layers whose channels alternate in a tensor of zeros, flattened with its space."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.last = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        y = a.new_zeros(a.shape[0], 2 * a.shape[1], *a.shape[2:])
        y[:, 0::2], y[:, 1::2] = a, b
        return self.head((y + self.last(y)).flatten(1))


def test_batch_and_space_of_a_tensor_of_zeros_are_no_channels() -> None:
    net = WrittenIntoZeros()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert [(g.layers, g.units, g.kept) for g in plan.groups] == [(("one", "two", "last"), 8, 4)]
    assert fpgm.verify(net, plan, X).ok


def test_a_group_keeps_two_channels_where_the_order_of_one_cannot_be_checked() -> None:
    class Still(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).view(-1, 8, 64)
            return F.instance_norm(y).mean(2)  # zero, whatever the layers compute

    net = Still(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1))
    plan = fpgm.plan(net, X, rate=0.75, align=1)
    assert [cut.kept for cut in plan.cuts if cut.tensor == "0.weight"] == [2]
    assert "the order of a single channel cannot be checked" in str(plan)


class BorrowsWidth(nn.Module):
    """A view whose width is that of another layer, long after that layer ran."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.back = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 16, 1),
            nn.Conv2d(16, 8, 1),
        )
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        b, c, h, w = x.shape
        x = self.back(self.mid(x).relu()).softmax(1)
        return self.head(x.view(b, c, h, w))


def test_the_layer_that_fixes_a_size_is_frozen_and_not_the_one_that_ran_last() -> None:
    plan = fpgm.plan(net := BorrowsWidth(), X, rate=0.5, align=1)
    assert [(g.name, g.units, g.kept) for g in plan.groups] == [("mid", 16, 8)]
    assert "sizes are fixed in the code" in plan.frozen[0].reason
    assert fpgm.verify(net, plan, X).ok


class ChangesHalfInPlace(nn.Module):
    """The first channels are changed in place, by a number in the code or half of the width."""

    def __init__(self, half: int | None) -> None:
        super().__init__()
        self.half = [half]  # not an attribute that could be updated
        self.first, self.head = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, : self.half[0] or y.shape[1] // 2].relu_()
        return self.head(y)


def test_a_slice_that_is_left_out_of_a_narrow_model_is_missed() -> None:
    with pytest.raises(fpgm.ModelError, match="There is nothing to prune"):
        fpgm.plan(ChangesHalfInPlace(6), X, rate=0.5, align=1)
    net = ChangesHalfInPlace(None)
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert [(g.units, g.kept) for g in plan.groups] == [(12, 6)]
    assert fpgm.verify(net, plan, X).ok


def test_a_norm_of_which_only_the_statistics_are_used_keeps_its_own_size() -> None:
    class Standardized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = (
                nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.Conv2d(12, 4, 1)
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            mean, var = self.norm.running_mean, self.norm.running_var
            y = (self.first(x) - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
            return self.head(y.relu())

    small = fpgm.prune(Standardized(), X, rate=0.5, align=1)
    assert (small.first.out_channels, len(small.norm.running_mean)) == (6, 6)
    assert (small.norm.num_features, len(small.norm.weight)) == (12, 12)
