"""Which layers are solved, with which batch norm, and what their own forwards compute."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.recoverable import batches, stir, unseen
from torch import Tensor, nn

import fpgm
from fpgm.recovery import api as recover_module
from fpgm.recovery.solvable_layers import SolvableLayers, find_solvable_layers
from fpgm.utils.example_inputs import Example


def found_in(model: nn.Module) -> SolvableLayers:
    return find_solvable_layers(model.eval(), Example((torch.randn(2, 3, 6, 6),), {}))


class ThenReLU(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class ThenHalves(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out[:, :2].mul_(0.5)
        return out


class WithoutBias(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight)


class OtherGroups(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(torch.cat([x, x], 1), self.weight, self.bias, groups=2)


class ConvNormReLU(nn.Conv2d):
    """A convolution, norm and activation in one, as some detectors have."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(inputs, outputs, kernel, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.norm(F.conv2d(x, self.weight, padding=self.padding)))


@pytest.mark.parametrize("kind", [ThenReLU, ThenHalves])
def test_forwards_that_do_more_than_a_convolution(kind: type[nn.Conv2d]) -> None:
    results = found_in(kind(3, 4, 1))
    assert [layer.path for layer in results.layers] == [""]
    assert not results.unsolvable


@pytest.mark.parametrize("kind", [WithoutBias, OtherGroups])
def test_forwards_that_convolve_in_another_way(kind: type[nn.Conv2d]) -> None:
    results = found_in(kind(3, 4, 1))
    assert not results.layers
    reason = "its forward convolves with another bias or with other groups"
    assert results.unsolvable == {"": reason}


@pytest.mark.parametrize("kind", [ThenReLU, ConvNormReLU])
@pytest.mark.parametrize("memory", [None, 1])
def test_layers_in_the_middle_of_custom_forwards_are_solved_exactly(
    kind: Any, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removed filter equals a kept one, so that nothing is lost once readers are solved."""
    if memory is not None:  # offload all activations of paused passes
        monkeypatch.setattr(recover_module, "device_memory", lambda _: memory)
    torch.manual_seed(0)
    model = stir(nn.Sequential(kind(3, 8, 3), kind(8, 8, 3), kind(8, 4, 3)))
    with torch.no_grad():
        for tensor in (*model[0].parameters(), *model[0].buffers()):
            if tensor.ndim:
                tensor[5] = tensor[2]
    data = batches(3, 8, 8)
    plan = fpgm.plan(model, data[0], rates={"0": 1 / 8}, rate=0, align=1)
    small = fpgm.recover(model, plan, data)
    assert {solved.layer for solved in small.fpgm_recovery.layers} == {"0", "1", "2"}
    assert not small.fpgm_recovery.unsolved
    before, after = unseen(model, small, plan, torch.randn(64, 3, 8, 8))
    assert after < 1e-6 * before


class NormTwice(nn.Module):
    """A batch norm behind a layer, and behind an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.two(self.norm(self.one(x))).relu())


class ScaledNorm(nn.BatchNorm2d):
    """Its scale is not its weight."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, self.weight + 1, self.bias, eps=self.eps)


def test_norms_that_must_not_change_for_a_layer() -> None:
    scaled = nn.Sequential(nn.Conv2d(3, 4, 1), ScaledNorm(4))
    for model in (NormTwice(), scaled):
        assert all(layer.batch_norm is None for layer in found_in(model).layers)
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert [layer.batch_norm for layer in found_in(plain).layers] == ["1"]


class Unbatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.gate, self.one, self.each = nn.Linear(8, 8), nn.Conv2d(8, 8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        means = x.mean((2, 3))
        weights = self.gate(means.mean(0)) + torch.vmap(self.each)(means)
        return self.head(x * weights[..., None, None] + self.one(x[0]))


def test_layers_that_are_called_without_a_batch() -> None:
    torch.manual_seed(0)
    model, data = Unbatched().eval(), batches(3, 6, 6)
    recovery = fpgm.recover(model, fpgm.plan(model, data[0], rate=0.5, align=1), data).fpgm_recovery
    assert [solved.layer for solved in recovery.layers] == ["stem", "head"]
    assert {path for path, _ in recovery.unsolved} == {"gate", "one", "each"}


class AddsFirst(nn.Conv2d):
    """Adds to its input, and to itself: calling it twice is not the same as once."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        shift = torch.full_like(x[:, :1], self.calls / 10)
        return super().forward(x + shift)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def conv() -> nn.Conv2d:
            return nn.Conv2d(8, 8, 3, padding=1)

        self.stem, self.own = nn.Conv2d(3, 8, 1), AddsFirst(8, 8, 3, padding=1)
        self.one, self.two, self.head = conv(), conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        self.own.calls = 0
        x = self.stem(x).relu()
        y = self.one(self.own(x).relu()) + x
        y = self.two(y.relu()) + y
        return self.head(y.relu())


def test_additions_in_a_custom_forward_are_counted_once() -> None:
    torch.manual_seed(0)
    model = Positions().eval()
    plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1)
    recovery = fpgm.recover(model, plan, batches(3, 6, 6)).fpgm_recovery
    assert {solved.layer for solved in recovery.layers} == {"stem", "own", "one", "two", "head"}
    assert not any(math.isnan(solved.after) for solved in recovery.layers)


class Sometimes(nn.Conv2d):
    """Does without its weights for batches of five."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 5:
            return F.interpolate(x, scale_factor=1.0)
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)


def test_a_custom_forward_that_skips_its_convolution() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), Sometimes(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)]
    model = nn.Sequential(*layers).eval()
    data = [torch.randn(size, 3, 6, 6) for size in (8, 5, 8)]
    recovery = fpgm.recover(model, fpgm.plan(model, data[0], rate=0.5, align=1), data).fpgm_recovery
    assert [solved.layer for solved in recovery.layers] == ["0", "1", "3"]
    assert recovery.after < recovery.before
    assert len(fpgm.sensitivity(model, data[0], data, rates=()).groups) == 2


class Product(nn.Module):
    """A linear layer written out, which no solvable class wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1) @ self.matrix


def test_products_outside_of_solvable_layers_are_named_too() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), Product()).eval(), batches(3, 6, 6)
    recovery = fpgm.recover(model, fpgm.plan(model, data[0], rate=0.5, align=1), data).fpgm_recovery
    assert recovery.unsolved == (("2", "it is no convolution or linear layer"),)
    assert any(note.startswith("1 of 2 layers solved") for note in recovery.notes)
