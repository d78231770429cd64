"""Numbers that modules remember about their channels: followed, or said to be old."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm
from fpgm.errors import ModelError

X = torch.randn(2, 3, 16, 16)


def unit(ins: int, outs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(ins, outs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outs))


class Split(nn.Module):
    """As Ultralytics' C2f: its exporter takes the other forward."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.c = outs // 2
        self.first = unit(ins, 2 * self.c)
        self.inner = nn.Sequential(unit(self.c, self.c, 3), nn.SiLU(), unit(self.c, self.c, 3))
        self.last = unit(3 * self.c, outs)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, 1)
        out: Tensor = self.last(torch.cat([a, b, b + self.inner(b)], 1))
        return out

    def forward_split(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split((self.c, self.c), 1)
        out: Tensor = self.last(torch.cat([a, b, b + self.inner(b)], 1))
        return out


class RepVGG(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int = 1) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.groups, self.stride = ins, outs, 1, stride
        self.dense, self.one = unit(ins, outs, 3, stride), unit(ins, outs, 1, stride)
        self.identity = nn.BatchNorm2d(ins) if ins == outs and stride == 1 else None
        self.deployed: nn.Conv2d | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.deployed is not None:
            return F.relu(self.deployed(x))
        y = self.dense(x) + self.one(x)
        return F.relu(y if self.identity is None else y + self.identity(x))

    @torch.no_grad()
    def switch_to_deploy(self) -> None:
        self.deployed = nn.Conv2d(self.in_channels, self.out_channels, 3, self.stride, 1)
        branches = [(self.dense[0].weight, self.dense[1])]
        branches += [(F.pad(self.one[0].weight, [1] * 4), self.one[1])]
        if self.identity is not None:
            kernel = torch.zeros(self.in_channels, self.in_channels // self.groups, 3, 3)
            kernel[range(self.in_channels), range(self.in_channels), 1, 1] = 1
            branches.append((kernel, self.identity))
        self.deployed.weight.zero_()
        self.deployed.bias.zero_()  # type: ignore[union-attr]
        for weight, norm in branches:
            gain = norm.weight / (norm.running_var + norm.eps).sqrt()
            self.deployed.weight += weight * gain[:, None, None, None]
            self.deployed.bias += norm.bias - norm.running_mean * gain  # type: ignore[operator]


def chain(*parts: nn.Module) -> nn.Sequential:
    net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(5))
    net(X)
    return net.eval()


def pruned(net: nn.Module, **asked: Any) -> tuple[Any, fpgm.Plan]:
    plan = fpgm.plan(net, X, align=1, **asked)
    small = fpgm.compact(net, plan).eval()
    assert fpgm.verify(net, plan, X, compacted=small).ok
    return small, plan


@pytest.mark.parametrize("asked", [{"rate": 0.5}, {"macs": 0.4}])
def test_another_forward_of_a_module_runs_after_pruning(asked: dict[str, float]) -> None:
    small, plan = pruned(chain(unit(3, 16, 3), Split(16, 32)), **asked)
    want = small(X)
    assert small[1].c < 16
    small[1].forward = small[1].forward_split
    assert torch.allclose(small(X), want, atol=1e-5)
    assert not plan.stale


@pytest.mark.parametrize("asked", [{"rate": 0.5}, {"macs": 0.4}])
def test_repvgg_deploys_after_pruning(asked: dict[str, float]) -> None:
    blocks = [RepVGG(3, 16), RepVGG(16, 16), RepVGG(16, 32, 2), RepVGG(32, 32, 2)]
    small, _ = pruned(chain(*blocks), **asked)
    want = small(X)
    for block in small[:4]:
        block.switch_to_deploy()
    assert torch.allclose(small(X), want, atol=1e-4)
    assert small[1].in_channels == small[0].out_channels < 16


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.channels, self.hidden_channels = width, width // 4
        self.kernel_size = width
        self.reduced = width // 4
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(self.down(x.mean((2, 3), keepdim=True)).relu())
        return x * gate.sigmoid()


def test_names_that_are_no_sizes_are_listed_and_left() -> None:
    net = chain(unit(3, 16, 3), Squeeze(16))
    net.widths = (16, 4, 5)
    small, plan = pruned(net, rate=0.5)
    assert (small[1].channels, small[1].hidden_channels) == (8, 2)
    assert (small[1].kernel_size, small[1].reduced) == (16, 4)
    assert {(s.module, s.name, s.value) for s in plan.stale} == {
        ("1", "kernel_size", 16), ("1", "reduced", 4)
    }  # fmt: skip
    assert "reduced of 1 still says 4" in str(plan)
    assert fpgm.Plan.from_json(plan.to_json()) == plan


def test_a_plan_from_before_sizes_were_listed_still_loads() -> None:
    _, plan = pruned(chain(unit(3, 16, 3), unit(16, 8)), rate=0.5)
    raw = json.loads(plan.to_json())
    del raw["stale"], raw["cached"]
    assert fpgm.Plan.from_json(json.dumps(raw)) == plan


class Views(nn.Module):
    """Views by a number that, with `scaled`, is also a factor."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.dim, self.scaled = 16, scaled
        self.stem, self.query, self.out = (
            nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 4, 1)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.query(self.stem(x)).view(len(x), self.dim, -1)
        y = y * self.dim**-0.5 if self.scaled else y * 0.25
        out: Tensor = self.out(y.view(len(x), self.dim, 16, 16))
        return out


def test_a_number_with_a_second_meaning_is_left_and_its_channels_stay() -> None:
    small, _ = pruned(Views(scaled=False), rate=0.5)
    assert (small.dim, small.query.out_channels) == (8, 8)
    small, plan = pruned(Views(scaled=True), rate=0.5)
    assert (small.dim, small.query.out_channels, small.stem.out_channels) == (16, 16, 4)
    assert any("a size is fixed in the code" in row.reason for row in plan.frozen)


class Equalised(nn.Module):
    """A layer of its own class that scales by the number of its inputs."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.in_features = ins
        self.weight = nn.Parameter(torch.randn(outs, ins))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5).relu()


def test_a_layers_own_size_that_scales_is_left() -> None:
    net = nn.Sequential(nn.Flatten(), Equalised(768, 16), Equalised(16, 16), Equalised(16, 4))
    small, plan = pruned(net, rate=0.5)
    assert small[2].weight.shape == (8, 8)
    assert small[2].in_features == 16
    assert {s.name for s in plan.stale} == {"in_features"}


class TrainsWith(nn.Module):
    """Uses a size in training only."""

    def __init__(self, add: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.norm = nn.BatchNorm2d(8)
        self.width, self.add = 8, add

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = self.a(x)
        if self.training:
            y = self.add(self, y, target)
        out: Tensor = self.c(self.b(y).relu())
        return out


def needs_target(net: Any, y: Tensor, target: Tensor | None) -> Tensor:
    if target is None:
        raise ValueError("give targets in training")
    return y + target


@pytest.mark.parametrize(
    ("add", "width"),
    [
        (lambda net, y, _: y + torch.randn(1, 8, 1, 1), 8),
        (lambda net, y, _: y + torch.randn_like(y), 4),
        (lambda net, y, _: y * torch.ones(1, net.width, 1, 1), 4),
        (lambda net, y, _: y + net.norm(y.mean((2, 3), keepdim=True)), 4),
        (lambda net, y, _: y.view(-1, 8, *y.shape[2:]), 8),
        (lambda net, y, _: y if float(y.detach()[0, 0, 0, 0]) > 1e9 else y.view(-1, 8, 16, 16), 8),
    ],
    ids=["fixed noise", "noise", "attribute", "norm of one value", "view", "values"],
)
def test_sizes_used_in_training_only(add: Any, width: int) -> None:
    net = TrainsWith(add).eval()
    plan = fpgm.plan(net, X[:1], rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert fpgm.verify(net, plan, X[:1], compacted=small).ok
    assert (small.a.out_channels, small.b.out_channels) == (width, 4)
    assert small.train()(X).shape == (2, 4, 16, 16)
    assert plan.macs_before == fpgm.plan(net, X[:1], rate=0.25, align=1).macs_before


def test_examples_run_in_the_modes_in_which_they_work() -> None:
    net = TrainsWith(needs_target).eval()
    alone = fpgm.plan(net, X, rate=0.5, align=1)
    assert any("Train mode could not be traced" in note for note in alone.notes)
    target = torch.zeros(2, 8, 16, 16)
    both = fpgm.plan(net, [X, (X, target)], rate=0.5, align=1)
    assert not both.notes
    assert {group.name for group in both.groups} == {"b"}  # the target fixes the width of the first
    with pytest.raises(fpgm.errors.ForwardError):
        fpgm.plan(net, [X, X[:, :2]], rate=0.5)


def test_a_loop_over_channels_is_not_shortened() -> None:
    class Loops(TrainsWith):
        def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
            total = sum(0.1 for _ in range(self.width))
            out: Tensor = self.c(self.a(x).view(-1, self.width, 16, 16) + total)
            return out

    with pytest.raises(ModelError, match="a size is fixed in the code"):
        fpgm.plan(Loops(None), X, rate=0.5, align=1)


class ChecksWidth(nn.Module):
    """Its two inner layers may keep different numbers of channels: `in_channels` is of which?"""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels = 8
        self.a, self.b, self.head = unit(3, 8, 3), unit(8, 8, 3), nn.Conv2d(8, 4, 1)

    def check(self, width: int) -> None:
        if width != self.in_channels:  # pytest rewrites an assert into code that is always run
            raise ValueError("another width")

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.check(x.shape[1])
        out: Tensor = self.head(self.b(x))
        return out


def test_a_plan_that_leaves_a_size_that_code_may_read_is_run_once() -> None:
    torch.manual_seed(7)
    net = ChecksWidth().eval()
    plan = fpgm.plan(net, X, rates={"a.0": 0.25, "b.0": 0.125}, align=1)
    assert any(s.name == "in_channels" for s in plan.stale)
    assert {g.name: g.kept for g in plan.groups}.get("a.0", 8) == 8
    assert any("ValueError" in f.reason for f in plan.frozen)
    fpgm.compact(net, plan)(X)


class SizedInSpace(nn.Module):
    """The number in `dim` is a layer's width too, but sizes something else."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.dim, self.use = 16, use

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).relu())
        if self.use == "view":
            return y.flatten(2).view(1, 8, -1, self.dim).softmax(3).sum(2)
        if self.use == "norm":
            rows = y.flatten(2).view(1, 8, -1, self.dim)
            return F.layer_norm(rows, (self.dim,)).amax((2, 3))
        if self.use == "split":
            return y.flatten(2).split([self.dim, 64 - self.dim], 2)[0].sum(2)
        if self.use == "expand":
            means = y.mean((2, 3), keepdim=True)
            return means.expand(-1, -1, self.dim, -1).sum((2, 3))
        return y.repeat(1, 1, self.dim, 1).sum((2, 3))


@pytest.mark.parametrize("use", ["view", "norm", "split", "expand", "repeat"])
def test_a_number_that_sizes_something_else_stays(use: str) -> None:
    torch.manual_seed(0)
    net, x = SizedInSpace(use), torch.randn(1, 3, 8, 8)
    plan = fpgm.plan(net, x, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert (small.first.out_channels, small.dim) == (8, 16)
    assert fpgm.verify(net, plan, x, compacted=small).ok
