"""Kernels computed for every sample freeze their own channels, and the rest is pruned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm

X = torch.randn(2, 3, 8, 8)


def per_sample(x: Tensor, kernels: Tensor) -> Tensor:
    """Convolve each sample with its own kernels: [batch · out, in, k, k]."""
    b, c, h, w = x.shape
    padding = kernels.shape[-1] // 2
    y = F.conv2d(x.reshape(1, b * c, h, w), kernels, padding=padding, groups=b)
    return y.view(b, -1, h, w)


class Attended(nn.Module):
    """DyConv: attention mixes several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(4, 8, 8, 3, 3))
        self.hidden, self.scores = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        mix = self.scores(self.hidden(x.mean((2, 3))).relu()).softmax(1)
        return per_sample(x, (mix @ self.kernels.flatten(1)).view(-1, 8, 3, 3))


class Routed(nn.Module):
    """CondConv: a sigmoid for each kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.route = nn.Parameter(torch.randn(4, 8 * 8 * 9)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mix = self.route(x.mean((2, 3))).sigmoid()
        return per_sample(x, torch.matmul(mix, self.kernels).view(-1, 8, 3, 3))


class Generated(nn.Module):
    """A hypernetwork that sees the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.kernel = nn.Linear(8, 6), nn.Linear(6, 8 * 8)

    def forward(self, x: Tensor) -> Tensor:
        return per_sample(x, self.kernel(self.hidden(x.mean((2, 3))).relu()).view(-1, 8, 1, 1))


class PerPixel(nn.Module):
    """Involution: a kernel for every pixel, shared by the channels of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.kernel = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 2 * 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        kernels = self.kernel(self.hidden(x).relu()).view(b, 2, 1, 9, h, w)
        windows = F.unfold(x, 3, padding=1).view(b, 2, c // 2, 9, h, w)
        return (kernels * windows).sum(3).view(b, c, h, w)


def net(dynamic: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU(), dynamic,
        nn.ReLU(), nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1),
    )  # fmt: skip


AROUND = {("0", 16, 8), ("4.hidden", 6, 3), ("6", 16, 8)}


@pytest.mark.parametrize(
    ("dynamic", "pruned"),
    [
        (Attended, AROUND),
        (Routed, AROUND - {("4.hidden", 6, 3)} | {("4.route", 4, 2)}),
        (Generated, AROUND),
        (PerPixel, AROUND),
    ],
)
def test_the_rest_of_a_network_with_dynamic_kernels_is_pruned(
    dynamic: type[nn.Module], pruned: set[tuple[str, int, int]]
) -> None:
    model = net(dynamic())
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    assert pruned <= {(g.name, g.units, g.kept) for g in plan.groups}
    assert fpgm.verify(model, plan, X).ok


def test_the_reason_names_the_kernel() -> None:
    plan = fpgm.plan(net(Generated()), X, rate=0.5, align=1)
    reasons = {layer: frozen.reason for frozen in plan.frozen for layer in frozen.layers}
    assert reasons["4.kernel"].startswith("a kernel computed from activations is made of them")
    assert reasons["2"].startswith("a grouped convolution with a computed weight reads them")
