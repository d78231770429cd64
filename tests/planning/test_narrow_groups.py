"""A plan with a uniform rate advises to keep narrow groups, and only those."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import fpgm

X = torch.randn(1, 3, 16, 16)


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project, add: the block of mobile networks."""

    def __init__(self, inputs: int, outputs: int, expand: int, *, squeeze: bool = False) -> None:
        super().__init__()
        hidden = inputs * expand
        self.expand = nn.Conv2d(inputs, hidden, 1)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.reduce = nn.Conv2d(hidden, hidden // 4, 1) if squeeze else None
        self.excite = nn.Conv2d(hidden // 4, hidden, 1)
        self.project = nn.Conv2d(hidden, outputs, 1)
        self.adds = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.depthwise(self.expand(x).relu()).relu()
        if self.reduce is not None:
            out = out * self.excite(self.reduce(out.mean((2, 3), keepdim=True)).relu()).sigmoid()
        out = self.project(out)
        return x + out if self.adds else out


def mobile_net(expand: int = 4, *, squeeze: bool = False) -> nn.Sequential:
    widths = (16, 32, 32, 48, 48)
    blocks = [InvertedResidual(i, o, expand, squeeze=squeeze) for i, o in pairwise(widths)]
    head = [nn.Conv2d(48, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, *head).eval()


@pytest.mark.parametrize("squeeze", [False, True])
def test_the_streams_of_a_mobile_network_are_named_ready_to_be_ignored(squeeze: bool) -> None:
    net = mobile_net(squeeze=squeeze)
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    (note,) = plan.notes
    assert note == (
        "1.project, 3.project: few channels between wide depthwise layers. Less accuracy is lost "
        "if they keep all: ignore=('1.project', '3.project'), or allocate='sensitivity'."
    )
    spared = fpgm.plan(net, X, rate=0.5, align=1, ignore=("1.project", "3.project"))
    assert not spared.notes
    assert "note" in str(plan)


def test_streams_that_lose_nothing_are_not_named() -> None:
    rates = {"1.project": 0.0, "3.project": 0.0}
    assert not fpgm.plan(mobile_net(), X, rate=0.5, align=1, rates=rates).notes


def test_streams_that_are_about_as_wide_are_not_named() -> None:
    assert not fpgm.plan(mobile_net(expand=2), X, rate=0.5, align=1).notes


def test_measured_rates_need_no_advice() -> None:
    net = mobile_net()
    plan = fpgm.plan(
        net, X, rate=0.5, align=1, allocate="sensitivity", loader=[X.repeat(4, 1, 1, 1)]
    )
    assert not plan.notes


def test_a_bottleneck_without_depthwise_layers_is_left_to_the_user() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 16, 1), nn.ReLU(), nn.Conv2d(16, 64, 1),
        nn.ReLU(), nn.Conv2d(64, 4, 1),
    ).eval()  # fmt: skip
    assert not fpgm.plan(net, X, rate=0.5, align=1).notes
