"""Concatenation: dense, inception, U-Net, ghost."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .describe import ACTIVATIONS, ANY, WIDTHS, B, block
from .parts import Shape, activation, chain, conv, halving, norm_layer, shape_after, unit


@block("dense", ANY, growth=(4, 6, 8), layers=(2, 1, 3), act=ACTIVATIONS)
class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self, shape: Shape, growth: int, layers: int, act: str) -> None:
        super().__init__()
        self.steps = nn.ModuleList()
        for i in range(layers):
            width = shape[0] + i * growth
            self.steps.append(
                nn.Sequential(
                    norm_layer(shape, width), activation(act, width), conv(shape, width, growth)
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        recorded = [x]
        for step in self.steps:
            recorded.append(step(torch.cat(recorded, 1)))
        return torch.cat(recorded, 1)


@block("inception", private=True, hidden=WIDTHS, act=ACTIVATIONS)
class Inception(nn.Module):
    """Parallel branches, concatenated."""

    def __init__(self, shape: Shape, hidden: int, act: str) -> None:
        super().__init__()
        self.one = unit(shape, shape[0], 6, 1, act=act)
        self.three = nn.Sequential(
            unit(shape, shape[0], hidden, 1, act=act), unit(shape, hidden, 8, act=act)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(shape, shape[0], 4, 1, act=act))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.pooled(x)], 1)


@block("unet", out=WIDTHS, up=("interpolate", "transposed"))
class UNet(nn.Module):
    """Down, any blocks, up again, and the skipped input beside it."""

    def __init__(self, shape: Shape, out: int, up: str, body: tuple[B, ...]) -> None:
        super().__init__()
        self.down = unit(shape, shape[0], 12, stride=halving(shape))
        self.body, inner = chain(shape_after(self.down, shape), body)
        self.up = nn.ConvTranspose2d(inner[0], 8, 2, 2) if up == "transposed" else nn.Identity()
        self.join = unit(shape, shape[0] + (8 if up == "transposed" else inner[0]), out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.body(self.down(x)))
        y = F.interpolate(y, size=x.shape[2:])
        return self.join(torch.cat([y, x], 1))


@block("ghost", hidden=(8, 6, 12), how=("whole", "attr", "sliced"), act=ACTIVATIONS)
class Ghost(nn.Module):
    """Features and their cheap copies, perhaps cut to a width the module remembers."""

    def __init__(self, shape: Shape, hidden: int, how: str, act: str) -> None:
        super().__init__()
        self.primary = unit(shape, shape[0], hidden, 1, act=act)
        self.cheap = unit(shape, hidden, hidden, groups=hidden, act=act)
        self.out = {"whole": None, "attr": 2 * hidden, "sliced": 2 * hidden - 1}[how]

    def forward(self, x: Tensor) -> Tensor:
        y = self.primary(x)
        y = torch.cat([y, self.cheap(y)], 1)
        return y if self.out is None else y[:, : self.out]


@block("global_cat", out=WIDTHS)
class GlobalCat(nn.Module):
    """The image's mean, spread over space, beside the image (as in ASPP)."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__()
        self.join = unit(shape, 2 * shape[0], out, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True).expand(-1, -1, *x.shape[2:])
        return self.join(torch.cat([x, mean], 1))


@block("coordinates", out=WIDTHS)
class Coordinates(nn.Module):
    """Two constant channels, the pixel's place, beside the others."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__()
        self.join = unit(shape, shape[0] + 2, out)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        rows = torch.linspace(-1, 1, height, dtype=x.dtype).view(1, 1, -1, 1)
        columns = torch.linspace(-1, 1, width, dtype=x.dtype).view(1, 1, 1, -1)
        places = [p.expand(x.shape[0], 1, height, width) for p in (rows, columns)]
        return self.join(torch.cat([x, *places], 1))
