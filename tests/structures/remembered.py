"""Sizes that modules remember, some with a second meaning."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, unit

FAMILY = "remembered sizes"
IMAGES = (image(), image(size=20, batch=3))


@network(FAMILY, *IMAGES)
class ScaledByWidth(nn.Module):
    """The remembered width splits and, to a power, scales."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = 8
        self.stem, self.both = unit(3, 8), nn.Conv2d(8, 16, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(self.stem(x)).split(self.dim, 1)
        return self.head(a * b.sigmoid()) * self.dim**-0.5


@network(FAMILY, *IMAGES)
class AttentionScaledByWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dim = 8
        self.stem, self.qkv = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = self.stem(x).flatten(2).mT
        q, k, v = self.qkv(t).split(self.dim, -1)
        return self.head(((q @ k.mT) * self.dim**-0.5).softmax(-1) @ v)


@network(FAMILY, image(size=16), image(size=24))
class PoolSizeEqualsWidth(nn.Module):
    """One number is the width of a split and the size of a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 4
        self.stem, self.both = unit(3, 8), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(self.stem(x)).split(self.n, 1)
        return self.head(F.adaptive_avg_pool2d(a * b, self.n))


@network(FAMILY, *IMAGES)
class ViewsByWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return self.head(y.view(y.shape[0], self.width, -1).mean(2))


@network(FAMILY, *IMAGES)
class SplitsByTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = (6, 10)
        self.both = unit(3, 16)
        self.a, self.b, self.head = unit(6, 8), unit(10, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).split(self.sizes, 1)
        return self.head(self.a(a) + self.b(b))


@network(FAMILY, *IMAGES)
class SlicesByWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.half = 6
        self.both = unit(3, 12)
        self.a, self.head = unit(6, 6), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        return self.head(self.a(y[:, : self.half]) + y[:, self.half :])


@network(FAMILY, *IMAGES)
class HeadsTimesWidth(nn.Module):
    """Heads and their width are remembered apart."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_width = 2, 4
        self.stem, self.qkv = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24)
        self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = self.stem(x).flatten(2).mT
        n, s, _ = t.shape
        q, k, v = self.qkv(t).view(n, s, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.head(self.out(y.reshape(n, s, self.heads * self.head_width)).mean(1))


@network(FAMILY, *IMAGES)
class ChecksWidth(nn.Module):
    """An assertion compares the input with the remembered width."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels = 8
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        assert x.shape[1] == self.in_channels
        return self.head(self.b(x))


class RepBlock(nn.Module):
    """Its sizes are used only when it is switched to one kernel."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = before, after
        self.wide, self.thin = nn.Conv2d(before, after, 3, 1, 1), nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide(x) + self.thin(x)).relu()

    def switch_to_deploy(self) -> nn.Conv2d:
        conv = nn.Conv2d(self.in_channels, self.out_channels, 3, 1, 1)
        conv.weight.data = self.wide.weight.data + F.pad(self.thin.weight.data, (1, 1, 1, 1))
        conv.bias.data = self.wide.bias.data + self.thin.bias.data
        return conv


@network(FAMILY, *IMAGES)
def rep_blocks() -> nn.Module:
    return nn.Sequential(RepBlock(3, 8), RepBlock(8, 8), nn.Conv2d(8, 4, 1))


@network(FAMILY, *IMAGES)
class WidthInConfig(nn.Module):
    """The width lives in a dict of settings."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8, "classes": 4}
        self.a, self.head = unit(3, 16), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).split(self.config["width"], 1)
        return self.head(a + b)


@network(FAMILY, *IMAGES)
class NormalisedByWidth(nn.Module):
    """F.layer_norm gets the width from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = (8,)
        self.stem, self.up, self.down = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = self.stem(x).flatten(2).mT
        t = t + self.down(F.gelu(self.up(F.layer_norm(t, self.shape))))
        return self.head(t.mean(1))
