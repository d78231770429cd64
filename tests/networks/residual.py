"""Residual streams and other joins of two branches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .describe import ACTIVATIONS, ANY, NORMS, WIDTHS, B, block
from .parts import POOL_TO, Shape, activation, chain, conv, halving, norm_layer, unit


class PadShortcut(nn.Module):
    """Option A as a module: every second pixel, zeros for the new channels."""

    def __init__(self, stride: int, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.before, self.after = stride, before, after

    def forward(self, x: Tensor) -> Tensor:
        return _pad_channels(_every(x, self.stride), self.before, self.after)


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _every(x: Tensor, stride: int) -> Tensor:
    return x[(..., *[slice(None, None, stride)] * (x.dim() - 2))]


def _pad_channels(x: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 2) + (before, after))


@block(
    "residual",
    ANY,
    private=True,
    shortcut=(
        "identity",
        "projection",
        "pad",
        "pad_lambda",
        "pad_inline",
        "pad_derived",
        "cat_zero",
    ),
    hidden=WIDTHS,
    out=WIDTHS,
    norm=NORMS,
    act=ACTIVATIONS,
    last=("relu", "none", "silu"),
    inplace=(False, True),
)
class Residual(nn.Module):
    """Two convolutions beside a shortcut of any kind."""

    def __init__(
        self,
        shape: Shape,
        shortcut: str,
        hidden: int,
        out: int,
        norm: str,
        act: str,
        last: str,
        inplace: bool,
    ) -> None:
        super().__init__()
        channels = shape[0]
        widens = shortcut not in ("identity", "projection")
        if widens and channels > 24:
            shortcut, widens = "identity", False
        out = {"identity": channels, "projection": out}.get(shortcut, 2 * channels)
        stride = 1 if shortcut == "identity" else halving(shape)
        before, after = channels // 2, channels - channels // 2
        self.kind, self.stride, self.inplace = shortcut, stride, inplace
        self.conv1 = conv(shape, channels, hidden, stride=stride)
        self.norm1 = norm_layer(shape, hidden, norm)
        self.act = activation(act, hidden)
        self.conv2 = conv(shape, hidden, out)
        self.norm2 = norm_layer(shape, out, norm)
        self.last = activation(last, out)
        if shortcut == "projection":
            self.shortcut: nn.Module = nn.Sequential(
                conv(shape, channels, out, 1, stride), norm_layer(shape, out, norm)
            )
        elif shortcut == "pad":
            self.shortcut = PadShortcut(stride, before, after)
        elif shortcut == "pad_lambda":
            self.shortcut = Lambda(lambda x: _pad_channels(_every(x, stride), before, after))
        elif shortcut == "pad_inline":
            self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        if self.kind == "identity":
            short = x
        elif self.kind == "pad_inline":
            short = _pad_channels(_every(x, self.stride), self.before, self.after)
        elif self.kind == "pad_derived":
            extra = y.shape[1] - x.shape[1]
            short = _pad_channels(_every(x, self.stride), extra // 2, extra - extra // 2)
        elif self.kind == "cat_zero":
            short = _every(x, self.stride)
            short = torch.cat([short, short * 0], 1)
        else:
            short = self.shortcut(x)
        if self.inplace:
            y += short
        else:
            y = y + short
        return self.last(y)


@block("preact", ANY, private=True, hidden=WIDTHS, act=ACTIVATIONS)
class PreActivation(nn.Module):
    """Norm and activation before each convolution; the stream itself is never activated."""

    def __init__(self, shape: Shape, hidden: int, act: str) -> None:
        super().__init__()
        # In-place activation is safe only behind the norms here.
        self.norm1, self.act1 = norm_layer(shape, shape[0]), activation(act, shape[0])
        self.conv1 = conv(shape, shape[0], hidden)
        self.norm2, self.act2 = norm_layer(shape, hidden), activation(act, hidden)
        self.conv2 = conv(shape, hidden, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.act1(self.norm1(x)))
        return x + self.conv2(self.act2(self.norm2(y)))


@block("resnext", private=True, hidden=(8, 16, 12), groups=(2, 4), act=ACTIVATIONS)
class ResNeXt(nn.Module):
    """Bottleneck around a grouped convolution."""

    def __init__(self, shape: Shape, hidden: int, groups: int, act: str) -> None:
        super().__init__()
        self.reduce = unit(shape, shape[0], hidden, 1, act=act)
        self.grouped = unit(shape, hidden, hidden, groups=groups, act=act)
        self.expand = unit(shape, hidden, shape[0], 1, act="none")

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.expand(self.grouped(self.reduce(x))))


@block("res2net", private=True, width=(4, 3, 6), scales=(4, 2), how=("split_attr", "chunk"))
class Res2Net(nn.Module):
    """Splits that feed each other, joined again."""

    def __init__(self, shape: Shape, width: int, scales: int, how: str) -> None:
        super().__init__()
        self.scales, self.chunks = scales, how == "chunk"
        if not self.chunks:
            self.width = width
        self.reduce = unit(shape, shape[0], width * scales, 1)
        self.steps = nn.ModuleList(unit(shape, width, width) for _ in range(scales - 1))
        self.expand = unit(shape, width * scales, shape[0], 1, act="none")

    def forward(self, x: Tensor) -> Tensor:
        y = self.reduce(x)
        parts = y.chunk(self.scales, 1) if self.chunks else torch.split(y, self.width, 1)
        outs: list[Tensor] = []
        for i, step in enumerate(self.steps):
            outs.append(step(parts[i] if i == 0 else outs[-1] + parts[i]))
        return F.relu(x + self.expand(torch.cat([*outs, parts[-1]], 1)))


@block("join", ANY, kind=("add", "cat", "max", "mul", "stack", "min"))
class Join(nn.Module):
    """Any blocks beside the input, both brought to one shape and put together."""

    def __init__(self, shape: Shape, kind: str, body: tuple[B, ...]) -> None:
        super().__init__()
        self.kind = kind
        self.body, after = chain(shape, body)
        matches = after[0] == shape[0] or kind == "cat"
        self.match = nn.Identity() if matches else conv(shape, after[0], shape[0], 1)
        self.pool = None if after[1:] == shape[1:] else POOL_TO[len(shape) - 1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.match(self.body(x))
        if self.pool is not None:
            y = self.pool(y, x.shape[2:])
        if self.kind == "cat":
            return torch.cat([x, y], 1)
        if self.kind == "mul":
            return x * y
        if self.kind == "stack":
            return torch.stack([x, y]).sum(0)
        return {"add": torch.add, "max": torch.maximum, "min": torch.minimum}[self.kind](x, y)
