"""Widths that code uses as numbers: a plan alone must keep outputs right."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.tracing.code_names import CodeNames

X = torch.randn(2, 3, 8, 8)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 1)
        self.c = nn.Conv2d(16, 4, 1)

    def scale(self, f: Tensor) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        f = self.a(x).relu()
        out: Tensor = self.c(self.b(f).relu()) * self.scale(f)
        return out


SCALES: dict[str, Callable[[Base, Tensor], float]] = {
    "shape": lambda net, f: 1 / f.shape[1],
    "size": lambda net, f: f.size(1) ** -0.5,
    "numel": lambda net, f: f.numel() ** -0.5,
    "out_channels": lambda net, f: net.a.out_channels**-0.5,
    "weight": lambda net, f: net.a.weight.shape[0] ** -0.5,
    "compared": lambda net, f: 2.0 if f.shape[1] == 16 else 1.0,
    "length": lambda net, f: 1 / len(f[0]),
    "stride": lambda net, f: 1 / f.stride(0),
    "root": lambda net, f: math.sqrt(f.shape[1]),
    "looked up": lambda net, f: 2.0 if f.shape[1] in (16, 32) else 1.0,
}


@pytest.mark.parametrize("way", SCALES)
def test_a_width_that_is_used_as_a_number_stays(way: str) -> None:
    torch.manual_seed(0)
    net = type("Net", (Base,), {"scale": SCALES[way]})()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert (small.a.out_channels, small.b.out_channels) == (16, 8)
    assert fpgm.verify(net, plan, X, compacted=small).ok


def test_code_that_names_no_size_is_not_run_for_it() -> None:
    assert not CodeNames(Base()).may_compute_with_sizes
    net = type("Net", (Base,), {"scale": SCALES["shape"]})()
    assert CodeNames(net).may_compute_with_sizes
