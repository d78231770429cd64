"""Interleaved channels, remembered widths, sizes that only training uses, and kept state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .describe import ANY, block
from .parts import Shape, conv, fit, unit


@block("interleave", ANY, how=("flatten", "reshape", "behind", "strided"), hidden=(8, 4, 6, 1))
class Interleave(nn.Module):
    """Channels of two layers alternate, by every spelling."""

    def __init__(self, shape: Shape, how: str, hidden: int) -> None:
        super().__init__()
        self.how = how
        self.one, self.two = conv(shape, shape[0], hidden), unit(shape, shape[0], hidden)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        if self.how == "flatten":
            return torch.stack([a, b], 2).flatten(1, 2)
        if self.how == "reshape":
            return torch.stack([a, b], 2).reshape(a.shape[0], 2 * a.shape[1], *a.shape[2:])
        if self.how == "behind":  # one pair of pixels for each channel
            return torch.stack([a, b], -1).flatten(-2)
        y = a.new_zeros(a.shape[0], 2 * a.shape[1], *a.shape[2:])
        y[:, 0::2], y[:, 1::2] = a, b
        return y


@block("remembered", ANY, meaning=("none", "power", "count", "exponent"), hidden=(8, 6, 4))
class Remembered(nn.Module):
    """A width in an attribute, which splits the channels and may mean something else too."""

    def __init__(self, shape: Shape, meaning: str, hidden: int) -> None:
        super().__init__()
        self.meaning, self.dim = meaning, hidden
        self.both = conv(shape, shape[0], 2 * hidden)
        self.last = unit(shape, hidden, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).split(self.dim, 1)
        y = a * b.sigmoid()
        if self.meaning == "power":
            y = y * self.dim**-0.5
        elif self.meaning == "count":
            y = y / y.flatten(2).shape[2] * self.dim
        elif self.meaning == "exponent":
            y = y * 0.9**self.dim
        return self.last(y)


@block("train_only", ANY, how=("noise", "mask", "view", "layer"))
class TrainOnly(nn.Module):
    """A size in the code that only training mode uses."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__()
        self.how, self.channels = how, shape[0]
        self.register_buffer("ones", torch.ones(shape[0], *[1] * (len(shape) - 1)))
        self.conv = conv(shape, shape[0], shape[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if not self.training:
            return x
        if self.how == "noise":
            return x + 0.1 * torch.randn(self.channels, *[1] * (x.ndim - 2), dtype=x.dtype)
        if self.how == "mask":
            return x * (torch.rand(x.shape[0], self.channels, *[1] * (x.ndim - 2)) > 0.1)
        if self.how == "view":
            return x + x.reshape(-1, self.channels, *x.shape[2:])
        return x * self.ones


@block("keeps", ANY, how=("features", "mask", "log"))
class Keeps(nn.Module):
    """State in a plain attribute: the last features, a mask of their width, or numbers."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv = unit(shape, shape[0], shape[0])
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.how == "features":
            self.kept = x
            return x + 0
        if self.how == "log":
            self.kept = x.mean().item()
            return x
        if self.kept is None or self.kept.shape[1] != x.shape[1]:
            self.kept = torch.full((1, x.shape[1], *[1] * (x.ndim - 2)), 0.5)
        return x * self.kept.to(x)


@block("pairs", how=("even_odd", "unbind", "rotate"), hidden=(8, 4, 6))
class Pairs(nn.Module):
    """Neighbouring channels are read in pairs: gates, or a rotation."""

    def __init__(self, shape: Shape, how: str, hidden: int) -> None:
        super().__init__()
        self.how = how
        self.fit, channels = fit(shape, 2)
        self.both = conv(shape, channels, 2 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(self.fit(x))
        if self.how == "unbind":
            a, b = y.unflatten(1, (-1, 2)).unbind(2)
        else:
            a, b = y[:, 0::2], y[:, 1::2]
        if self.how == "rotate":
            turned = torch.stack([0.8 * a - 0.6 * b, 0.6 * a + 0.8 * b], 2)
            return turned.flatten(1, 2).relu()
        return a * b.sigmoid()
