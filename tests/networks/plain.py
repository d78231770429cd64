"""Plain convolutions, norms, activations, pooling; tied and shared weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .describe import ACTIVATIONS, ANY, LARGEST, NORMS, WIDTHS, block
from .parts import (
    AVGPOOL,
    CONVOLVE,
    MAXPOOL,
    TRANSPOSED,
    Shape,
    activation,
    conv,
    fit,
    halving,
    norm_layer,
    unit,
)


@block("conv", ANY, out=WIDTHS, kernel=(3, 1), stride=(1, 2), norm=NORMS, act=ACTIVATIONS)
class Plain(nn.Module):
    """Convolution with bias, norm, activation."""

    def __init__(
        self, shape: Shape, out: int, kernel: int, stride: int, norm: str, act: str
    ) -> None:
        super().__init__()
        stride = min(stride, halving(shape))
        self.layers = unit(shape, shape[0], out, kernel, stride, act=act, kind=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@block("functional", ANY, out=WIDTHS, act=ACTIVATIONS)
class Functional(nn.Module):
    """A convolution that is a parameter and a function call, not a module."""

    def __init__(self, shape: Shape, out: int, act: str) -> None:
        super().__init__()
        dims = len(shape) - 1
        self.convolve = CONVOLVE[dims]
        self.kernel = nn.Parameter(
            torch.randn(out, shape[0], *[3] * dims) / (shape[0] * 3**dims) ** 0.5
        )
        self.shift = nn.Parameter(torch.randn(out) / 4)
        self.act = activation(act, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.convolve(x, self.kernel, self.shift, padding=1))


@block("weight_norm", ANY, out=WIDTHS, act=ACTIVATIONS)
class WeightNormed(nn.Module):
    """A convolution whose weight is a direction times a length."""

    def __init__(self, shape: Shape, out: int, act: str) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(conv(shape, shape[0], out))
        self.act = activation(act, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


@block("shared", ANY, where=("sequence", "branches"), act=ACTIVATIONS)
class Shared(nn.Module):
    """One convolution that runs twice: on its own output, or on two views of its input."""

    def __init__(self, shape: Shape, where: str, act: str) -> None:
        super().__init__()
        self.conv = conv(shape, shape[0], shape[0])
        self.act = activation(act, shape[0])
        self.sequence = where == "sequence"

    def forward(self, x: Tensor) -> Tensor:
        once = self.act(self.conv(x))
        return self.act(self.conv(once)) if self.sequence else once + self.conv(x.flip(-1))


@block("tied", ANY, where=("twice", "autoencoder"), hidden=WIDTHS, act=ACTIVATIONS)
class Tied(nn.Module):
    """Two layers with one weight: two convolutions, or a convolution and its transpose."""

    def __init__(self, shape: Shape, where: str, hidden: int, act: str) -> None:
        super().__init__()
        if where == "twice":
            self.first = conv(shape, shape[0], shape[0])
            self.second = conv(shape, shape[0], shape[0])
            self.act = activation(act, shape[0])
        else:
            self.first = conv(shape, shape[0], hidden)
            self.second = TRANSPOSED[len(shape) - 1](hidden, shape[0], 3, 1, 1)
            self.act = activation(act, hidden)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


@block("transposed", ANY, out=(8, 12, 16, 24), groups=(1, 2, 4), norm=NORMS, act=ACTIVATIONS)
class Transposed(nn.Module):
    """Transposed convolution, upsampling where there is room."""

    def __init__(self, shape: Shape, out: int, groups: int, norm: str, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, groups)
        size = (2, 2, 0) if max(shape[1:]) * 2 <= LARGEST else (3, 1, 1)
        self.up = TRANSPOSED[len(shape) - 1](channels, out, *size, groups=groups)
        self.norm = norm_layer(shape, out, norm)
        self.act = activation(act, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.up(self.fit(x))))


@block("norm", ANY, norm=("batch", "batch_plain", "instance"))
class NormAlone(nn.Module):
    """A per-channel norm with no convolution next to it."""

    def __init__(self, shape: Shape, norm: str) -> None:
        super().__init__()
        self.norm = norm_layer(shape, shape[0], norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@block("group_norm", ANY, groups=(2, 4, "each"))
class GroupNormed(nn.Module):
    """Norm over groups of channels; with a group for each it is exact."""

    def __init__(self, shape: Shape, groups: int | str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, groups if isinstance(groups, int) else 1)
        self.norm = nn.GroupNorm(groups if isinstance(groups, int) else channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fit(x))


@block("layer_norm")
class LayerNormed(nn.Module):
    """Norm over all channels, channels last."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@block("act", ANY, act=tuple(a for a in ACTIVATIONS if a != "none"))
class ActAlone(nn.Module):
    """An activation with nothing next to it."""

    def __init__(self, shape: Shape, act: str) -> None:
        super().__init__()
        self.act = activation(act, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        # An in-place activation must not change what a neighbour still holds.
        return self.act(x.clone())


@block("scale", ANY, shift=(False, True), buffer=(False, True))
class Scale(nn.Module):
    """Layer scale: a factor a channel, learnt or fixed, and perhaps a shift."""

    def __init__(self, shape: Shape, shift: bool, buffer: bool) -> None:
        super().__init__()
        gamma = torch.rand(shape[0], *[1] * (len(shape) - 1)) + 0.5
        if buffer:
            self.register_buffer("gamma", gamma)
        else:
            self.gamma = nn.Parameter(gamma)
        self.beta = nn.Parameter(torch.randn(gamma.shape)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gamma
        return x if self.beta is None else x + self.beta


@block("pool", ANY, kind=("max", "avg"))
class Pool(nn.Module):
    """Spatial pooling, by two where there is room."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        result = MAXPOOL if kind == "max" else AVGPOOL
        self.pool = result[len(shape) - 1](halving(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)


@block("interpolate", mode=("nearest", "bilinear"))
class Interpolate(nn.Module):
    """Resizing: up by two where there is room, else down by two."""

    def __init__(self, shape: Shape, mode: str) -> None:
        super().__init__()
        self.factor = 2.0 if max(shape[1:]) * 2 <= LARGEST else 0.5
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=self.factor, mode=self.mode)
