"""Weights computed from parameters that are not zero where the parameters are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm

X = torch.randn(2, 3, 8, 8)
Compute = Callable[["Computed"], Tensor]


class Computed(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.kernel = nn.Parameter(torch.randn(12, 8, 3, 3) * 0.1)
        self.make = nn.Linear(9, 9)
        self.head = nn.Conv2d(12, 4, 1)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        weight = self.compute(self)
        out: Tensor = self.head(F.conv2d(self.stem(x).relu(), weight, padding=1).relu())
        return out


LIFTED: dict[str, Compute] = {
    "exp": lambda net: net.kernel.exp(),
    "softmax": lambda net: net.kernel.flatten(2).softmax(2).view_as(net.kernel),
    "added number": lambda net: net.kernel + 0.1,
    "added constant": lambda net: net.kernel + torch.full_like(net.kernel, 0.1),
    "clamp": lambda net: net.kernel.clamp(min=0.02),
    "where": lambda net: torch.where(net.kernel >= 0, 1.0, -1.0),
    "fill": lambda net: net.kernel.masked_fill(net.kernel < 0.05, 0.01),
    "hypernetwork": lambda net: net.make(net.kernel.flatten(2)).unflatten(2, (3, 3)),
}
KEPT: dict[str, Compute] = {
    "tanh": lambda net: net.kernel.tanh(),
    "scaled": lambda net: net.kernel * (1 + net.make.weight.mean()),
    "sum": lambda net: net.kernel + net.kernel.flip(2),
    "gated": lambda net: net.kernel * net.kernel.sigmoid(),
    "product": lambda net: F.linear(net.kernel.flatten(2), net.make.weight).view_as(net.kernel),
}


@pytest.mark.parametrize("way", [*LIFTED, *KEPT])
def test_a_plan_without_certificate_is_right(way: str) -> None:
    """What reads a removed channel is compared with zeros, so zeros must stay zero."""
    torch.manual_seed(0)
    net = Computed({**LIFTED, **KEPT}[way]).eval()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert small.stem.out_channels == (8 if way in LIFTED else 4)
    assert fpgm.verify(net, plan, X, compacted=small).ok
