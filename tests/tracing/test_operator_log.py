"""Two passes are compared by the operators they run, with the numbers and tensors these take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm
from fpgm.errors import ModelError
from fpgm.planning import planner as planner_module
from fpgm.tracing.operator_log import OperatorLog, record_operators
from fpgm.utils.example_inputs import as_examples

X = torch.randn(1, 3, 8, 8)


class Scaled(nn.Module):
    """A layer whose width is also used as a number, a size in space or not at all."""

    def __init__(self, use: str, dim: int = 8) -> None:
        super().__init__()
        self.use, self.dim = use, dim
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.use == "number":
            y = y * self.dim**-0.5
        elif self.use == "pool":
            y = F.adaptive_avg_pool2d(y, self.dim)
        elif self.use == "numpy":
            y = y * torch.from_numpy(np.full(1, self.dim, dtype="float32"))
        elif self.use == "counter":
            n = torch.zeros((), dtype=torch.int64)
            n += self.dim
            y = y / n
        elif self.use == "branch" and self.dim < 8:
            y = y.relu()
        elif self.use == "other tensor":
            z = self.first(x)
            y = (y if self.dim == 8 else z) + z
        elif self.use == "size":
            y = y.view(1, self.dim, -1).view(1, self.dim, 8, 8)
        return self.last(y)


def log_of(model: nn.Module) -> OperatorLog:
    log = record_operators(model.eval(), as_examples(X)[0])
    assert log is not None
    return log


def with_dim(use: str, dim: int) -> OperatorLog:
    torch.manual_seed(0)
    model = Scaled(use)
    model.dim = dim
    return log_of(model)


@pytest.mark.parametrize("use", ["number", "pool", "numpy", "counter", "branch", "other tensor"])
def test_an_attribute_that_changes_what_is_computed_shows(use: str) -> None:
    assert with_dim(use, 8).is_same(with_dim(use, 8), sizes_may_differ=False)
    assert not with_dim(use, 8).is_same(with_dim(use, 4), sizes_may_differ=True)


def test_an_attribute_that_nothing_reads_does_not_show() -> None:
    assert with_dim("nothing", 8).is_same(with_dim("nothing", 4), sizes_may_differ=False)


def test_sizes_of_channels_may_differ_if_the_caller_reports_it() -> None:
    wide, narrow = Scaled("size"), Scaled("size", 4)
    narrow.first, narrow.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
    assert log_of(wide).is_same(log_of(narrow), sizes_may_differ=True)
    assert not log_of(wide).is_same(log_of(narrow), sizes_may_differ=False)


def test_code_that_reads_values_is_not_recorded() -> None:
    class Reads(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if float(y.detach().max()) > 0 else -y

    assert record_operators(Reads(3, 4, 3), as_examples(X)[0]) is None


def test_recording_keeps_weights_and_counters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    log_of(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Remembers(nn.Module):
    """Reads its width in a check, so that it may not be changed unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = (
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 4, 1),
        )
        self.out_channels = 16

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        assert y.shape[1] <= self.out_channels
        return self.last(F.dropout(y, 0.5, self.training).relu_())


def test_a_size_follows_without_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a certificate was made")

    monkeypatch.setattr(planner_module, "find_difference", refuse)
    monkeypatch.setattr(planner_module, "certify", refuse)
    plan = fpgm.plan(Remembers().eval(), X, rate=0.5, align=1)
    assert ("", "out_channels", 16, 8) in {
        (a.module, a.name, a.before, a.after) for a in plan.attributes
    }


def test_a_width_used_as_a_number_is_still_found() -> None:
    net = Scaled("number").eval()
    small = fpgm.prune(net, X, rate=0.5, align=1)
    assert small.dim == 8  # the scale of what is left must not change
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    fpgm.verify(net, plan, X).check()


class Trains(nn.Module):
    """Does something else in train mode, or the same."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.noise = noise
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.norm(self.conv(x)), 0.2, self.training)
        if self.training and self.noise:
            y = y + torch.randn(1, 8, 1, 1)
        return self.last(y)


@pytest.mark.parametrize("noise", [False, True])
def test_train_mode_is_traced_in_full_only_if_it_runs_other_operators(noise: bool) -> None:
    from fpgm.planning.budget import Budget
    from fpgm.planning.planner import Planner

    net = Trains(noise).eval()
    planner = Planner(net, X, budget=Budget(0.5, None, None, {}, None))
    passes = planner.structure.trace.passes
    assert [one.training for one in passes] == ([False, True] if noise else [False])
    assert not net.training
    assert bool(planner.structure.groups) is not noise  # noise of a fixed shape keeps all channels


class SplitsInTraining(nn.Module):
    """Divides its channels into four blocks in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        blocks = 4 if self.training else 1
        y = self.first(x).view(len(x), blocks, -1, 8, 8)
        return self.last((y - y.mean(3, keepdim=True)).view(len(x), -1, 8, 8))


def test_a_size_that_only_train_mode_has_is_kept() -> None:
    with pytest.raises(ModelError, match="sizes are fixed in the code"):
        fpgm.plan(SplitsInTraining(), X, rate=0.4, align=1)
