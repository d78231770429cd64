"""Backends with a simulated clock, whose times are known beforehand."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fpgm.latency.backends import LoadedModel
from fpgm.tracing.layer_calls import LayerSpec
from fpgm.utils.example_inputs import Example

CONV = LayerSpec("conv", 1, (8, 8), 64, 64, (3, 3), (1, 1), (1, 1), (1, 1))
NET_SECONDS = 0.004


def macs(layer: LayerSpec) -> float:
    per = layer.reads // layer.groups * layer.writes * math.prod(layer.kernel)
    return per * layer.batch * math.prod(layer.space)


class Ideal:
    """A backend whose simulated times are proportional to MACs, for layers and models."""

    name = "ideal"

    def __init__(self, wrong: float = 1.0) -> None:
        self.asked: list[LayerSpec] = []
        self.wrong = wrong
        """Exponent that makes the times of layers wrong, unless it is 1."""
        self.now = 0.0

    def unavailable_reason(self) -> None:
        return None

    def version(self) -> str:
        return "1"

    def load(self, model: nn.Module, example: Example, threads: int) -> LoadedModel:
        with FlopCounterMode(display=False) as counter:
            example.call(model)
        seconds = NET_SECONDS * counter.get_total_flops() / FULL

        def run() -> None:
            self.now += seconds

        return LoadedModel(run)

    def layer_seconds(self, layer: LayerSpec, threads: int) -> float:
        self.asked.append(layer)
        return float(NET_SECONDS * (2 * macs(layer) / FULL) ** self.wrong)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.ReLU(),
        nn.Conv2d(64, 16, 1),
    ).eval()  # fmt: skip


X = torch.randn(1, 3, 8, 8)
with FlopCounterMode(display=False) as _counter:
    net()(X)
FULL = _counter.get_total_flops()


class Stepwise(Ideal):
    """Computes blocks of channels, as vector units do, after a constant overhead."""

    def __init__(self, block: int = 8, overhead: float = 0.0) -> None:
        super().__init__()
        self.block, self.overhead = block, overhead
        """Constant time of a layer, relative to a layer of 64 channels."""

    def layer_seconds(self, layer: LayerSpec, threads: int) -> float:
        blocks = math.ceil(layer.reads / self.block) * math.ceil(layer.writes / self.block)
        return 1e-6 * (blocks * self.block**2 + self.overhead * 64**2)
