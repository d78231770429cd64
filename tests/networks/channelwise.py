"""Channel by channel: depthwise and grouped convolutions, gates, attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .describe import ACTIVATIONS, ANY, NORMS, WIDTHS, block
from .parts import Shape, conv, fit, unit


@block("separable", ANY, multiplier=(1, 2), out=WIDTHS, norm=NORMS, act=ACTIVATIONS)
class Separable(nn.Module):
    """Depthwise convolution, then a pointwise one."""

    def __init__(self, shape: Shape, multiplier: int, out: int, norm: str, act: str) -> None:
        super().__init__()
        c, wide = shape[0], multiplier * shape[0]
        self.depth = unit(shape, c, wide, groups=c, act=act, kind=norm)
        self.point = unit(shape, wide, out, 1, act=act, kind=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(self.depth(x))


@block("inverted", private=True, hidden=(16, 12, 24), gate=(False, True), act=ACTIVATIONS)
class Inverted(nn.Module):
    """Expand, depthwise, perhaps a gate, project, add: MobileNet's block."""

    def __init__(self, shape: Shape, hidden: int, gate: bool, act: str) -> None:
        super().__init__()
        self.expand = unit(shape, shape[0], hidden, 1, act=act)
        self.depth = unit(shape, hidden, hidden, groups=hidden, act=act)
        inner = (hidden, *shape[1:])
        self.gate = SqueezeExcite(inner, "conv", 4, "sigmoid") if gate else nn.Identity()
        self.project = unit(shape, hidden, shape[0], 1, act="none")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.gate(self.depth(self.expand(x))))


@block("grouped", ANY, groups=(2, 4), out=(8, 12, 16, 24), norm=NORMS, act=ACTIVATIONS)
class Grouped(nn.Module):
    """Grouped convolution, as many channels in as come, others out."""

    def __init__(self, shape: Shape, groups: int, out: int, norm: str, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, groups)
        self.layers = unit(shape, channels, out, groups=groups, act=act, kind=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.fit(x))


@block("se", private=True, how=("conv", "linear"), hidden=(4, 6), gate=("sigmoid", "hardsigmoid"))
class SqueezeExcite(nn.Module):
    """A factor a channel, computed from all channels' means."""

    def __init__(self, shape: Shape, how: str, hidden: int, gate: str) -> None:
        super().__init__()
        self.convolves = how == "conv"
        if self.convolves:
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.reduce: nn.Module = nn.Conv2d(shape[0], hidden, 1)
            self.expand: nn.Module = nn.Conv2d(hidden, shape[0], 1)
        else:
            self.reduce, self.expand = nn.Linear(shape[0], hidden), nn.Linear(hidden, shape[0])
        self.gate = nn.Sigmoid() if gate == "sigmoid" else nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        if self.convolves:
            return x * self.gate(self.expand(F.relu(self.reduce(self.pool(x)))))
        batch, channels = x.shape[:2]
        factor = self.gate(self.expand(F.relu(self.reduce(x.mean((2, 3))))))
        return x * factor.view(batch, channels, 1, 1)


@block("eca", kernel=(3, 5))
class ChannelConv(nn.Module):
    """A factor a channel, computed from its neighbors' means by a convolution over channels."""

    def __init__(self, shape: Shape, kernel: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.conv = nn.Conv1d(1, 1, kernel, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.pool(x).squeeze(-1).transpose(-1, -2)
        return x * torch.sigmoid(self.conv(mean).transpose(-1, -2).unsqueeze(-1))


@block("spatial_gate", ANY)
class SpatialGate(nn.Module):
    """One factor a pixel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.conv = conv(shape, shape[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv(x))


@block("self_gate", ANY)
class SelfGate(nn.Module):
    """A factor a channel from its own mean, without parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.space = tuple(range(2, len(shape) + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.mean(self.space, keepdim=True))


@block("channel_mean")
class ChannelMean(nn.Module):
    """Spatial attention from the mean and maximum over channels, which no channel can leave."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        recorded = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * torch.sigmoid(self.conv(recorded))


@block("channel_softmax", ANY)
class ChannelSoftmax(nn.Module):
    """Softmax over channels, which no channel can leave."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(1)


@block("selective", private=True, out=(8, 6, 12), how=("view", "layers"))
class SelectiveKernel(nn.Module):
    """Two kernels, mixed channel by channel with a softmax over the two."""

    def __init__(self, shape: Shape, out: int, how: str) -> None:
        super().__init__()
        self.near = unit(shape, shape[0], out)
        self.far = unit(shape, shape[0], out, 5)
        self.reduce = nn.Linear(out, 6)
        self.views = how == "view"
        if self.views:
            self.expand: nn.Module = nn.Linear(6, 2 * out)
        else:
            self.expands = nn.ModuleList(nn.Linear(6, out) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.near(x), self.far(x)], 1)
        code = F.relu(self.reduce(both.sum(1).mean((2, 3))))
        if self.views:
            weights = self.expand(code).view(x.shape[0], 2, -1)
        else:
            weights = torch.stack([expand(code) for expand in self.expands], 1)
        return (both * weights.softmax(1)[..., None, None]).sum(1)


@block("split_attention", private=True, out=(8, 4, 12), act=ACTIVATIONS)
class SplitAttention(nn.Module):
    """ResNeSt's: two halves of the channels, mixed with a softmax over the two."""

    def __init__(self, shape: Shape, out: int, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, 2)
        self.radix = 2
        self.conv = unit(shape, channels, 2 * out, groups=2, act=act)
        self.reduce = nn.Conv2d(out, 6, 1)
        self.expand = nn.Conv2d(6, 2 * out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.fit(x))
        batch, wide, height, width = y.shape
        halves = y.view(batch, self.radix, wide // self.radix, height, width)
        gap = halves.sum(1).mean((2, 3), keepdim=True)
        weights = self.expand(F.relu(self.reduce(gap)))
        weights = weights.view(batch, self.radix, -1, 1, 1).softmax(1)
        return (halves * weights).sum(1)


@block("non_local", hidden=(8, 4, 6), how=("matmul", "einsum"))
class NonLocal(nn.Module):
    """Attention between pixels: queries and keys share their units."""

    def __init__(self, shape: Shape, hidden: int, how: str) -> None:
        super().__init__()
        self.query = conv(shape, shape[0], hidden, 1)
        self.key = conv(shape, shape[0], hidden, 1)
        self.value = conv(shape, shape[0], hidden, 1)
        self.project = conv(shape, hidden, shape[0], 1)
        self.einsum = how == "einsum"

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        if self.einsum:
            mix = torch.einsum("bcn,bcm->bnm", query, key).softmax(-1)
            y = torch.einsum("bnm,bcm->bcn", mix, value)
        else:
            mix = (query.transpose(1, 2) @ key).softmax(-1)
            y = value @ mix.transpose(1, 2)
        return x + self.project(y.view(batch, -1, height, width))
