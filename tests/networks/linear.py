"""Linear layers over channels-last images."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .describe import ACTIVATIONS, ANY, WIDTHS, block
from .parts import Shape, activation, conv


@block("mlp", private=True, hidden=(12, 8, 24), act=ACTIVATIONS, adds=(False, True), out=WIDTHS)
class ChannelsLast(nn.Module):
    """Channels last, two linear layers, channels first again."""

    def __init__(self, shape: Shape, hidden: int, act: str, adds: bool, out: int) -> None:
        super().__init__()
        self.adds = adds
        self.first = nn.Linear(shape[0], hidden)
        self.act = activation("gelu" if act == "prelu" else act)
        self.second = nn.Linear(hidden, shape[0] if adds else out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.act(self.first(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        return x + y if self.adds else y


@block("convnext", private=True, hidden=(16, 24), scale=(True, False))
class ConvNeXt(nn.Module):
    """Depthwise convolution, layer norm, MLP, layer scale, add."""

    def __init__(self, shape: Shape, hidden: int, scale: bool) -> None:
        super().__init__()
        self.depth = conv(shape, shape[0], shape[0], groups=shape[0])
        self.norm = nn.LayerNorm(shape[0])
        self.first = nn.Linear(shape[0], hidden)
        self.second = nn.Linear(hidden, shape[0])
        self.gamma = nn.Parameter(torch.rand(shape[0]) + 0.5) if scale else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.second(F.gelu(self.first(y)))
        if self.gamma is not None:
            y = self.gamma * y
        return x + y.permute(0, 3, 1, 2)


@block("token_mix", ANY)
class TokenMix(nn.Module):
    """A linear layer over pixels, the same for every channel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        pixels = math.prod(shape[1:])
        self.mix = nn.Linear(pixels, pixels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.flatten(2)).view_as(x)
