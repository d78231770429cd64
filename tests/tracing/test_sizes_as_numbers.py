"""Widths that code uses as numbers: a plan alone must keep outputs right."""

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner

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
    "length of a row": lambda net, f: 1 / len(f[0]),
    "inverse stride": lambda net, f: 1 / f.stride(0),
    "root": lambda net, f: math.sqrt(f.shape[1]),
    "looked up": lambda net, f: 2.0 if f.shape[1] in (16, 32) else 1.0,
    "passed on": lambda net, f: math.sqrt(f.shape[1]),
    "returned": lambda net, f: width_of(f),
    "length": lambda net, f: len(net.a.weight),
    "product": lambda net, f: float(np.prod(f.shape[1:2])),
    "sum": lambda net, f: sum(f.shape[1:2]),
    "text": lambda net, f: len(str(tuple(f.shape))),
    "stride": lambda net, f: f.stride(0),
    "bytes": lambda net, f: f.nbytes,
    "key": lambda net, f: {16: 1.0}.get(f.shape[1], 2.0),
    "stored": lambda net, f: math.sqrt(net.a.out_channels),
    "script": lambda net, f: scripted_width(f),
    "little": lambda net, f: 1 + 1e-5 * f.shape[1],
}


def width_of(f: Tensor) -> int:
    return f.size(1)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_width = torch.jit.script(width_of)


@pytest.mark.parametrize("way", SCALES)
def test_a_width_that_is_used_as_a_number_stays(way: str) -> None:
    torch.manual_seed(0)
    net = type("Net", (Base,), {"scale": SCALES[way]})()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert (small.a.out_channels, small.b.out_channels) == (16, 8)
    assert fpgm.verify(net, plan, X, compacted=small).ok


def test_code_that_reads_no_size_is_not_run_for_it() -> None:
    assert not reads_sizes(Base())
    for way in SCALES:
        assert reads_sizes(type("Net", (Base,), {"scale": SCALES[way]})()), way


def reads_sizes(net: nn.Module) -> bool:
    trace = Planner(net, X, budget=Budget(rate=0.5)).structure.trace
    return trace.call_context.reads_sizes or trace.code.may_compute_with_sizes


def test_torch_may_read_sizes() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    assert not reads_sizes(net.eval())
