"""Channels of several layers that alternate in one tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, pooled, signal, unit

FAMILY = "interleaving"
IMAGES = (image(), image(size=20, batch=3))


@network(FAMILY, *IMAGES)
class StackThenFlatten(nn.Module):
    """Two branches, channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = unit(3, 8), unit(3, 8), unit(16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([self.a(x), self.b(x)], 2).flatten(1, 2)
        return self.head(pooled(self.c(y)))


@network(FAMILY, *IMAGES)
class StackThenReshape(nn.Module):
    """Three branches, by reshape with sizes read from the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(unit(3, 6) for _ in range(3))
        self.mix = nn.Conv2d(18, 10, 1)
        self.head = nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        y = torch.stack(parts, 2)
        n, c, k, h, w = y.shape
        return self.head(F.gelu(self.mix(y.reshape(n, c * k, h, w))))


@network(FAMILY, *IMAGES)
class StackBehindChannels(nn.Module):
    """Stacked in a last axis and read in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(3, 8)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.stack([pooled(self.a(x)), pooled(self.b(x))], -1)
        return self.head(pairs.flatten(1))


@network(FAMILY, *IMAGES)
class DeformableOffsets(nn.Module):
    """Offsets as (y, x) pairs sample the features, as deformable convolution does."""

    def __init__(self) -> None:
        super().__init__()
        self.features = unit(3, 8)
        self.guide = unit(8, 6)
        self.offset_y, self.offset_x = nn.Conv2d(6, 4, 3, 1, 1), nn.Conv2d(6, 4, 3, 1, 1)
        self.mix = nn.Conv2d(8 * 4, 8, 1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = self.features(x)
        g = self.guide(f)
        offsets = torch.stack([self.offset_y(g), self.offset_x(g)], 2).flatten(1, 2).tanh() * 0.2
        _, _, h, w = f.shape
        ys = torch.linspace(-1, 1, h, dtype=x.dtype)[:, None].expand(h, w)
        xs = torch.linspace(-1, 1, w, dtype=x.dtype)[None].expand(h, w)
        samples = []
        for k in range(4):
            grid = torch.stack([xs + offsets[:, 2 * k + 1], ys + offsets[:, 2 * k]], -1)
            samples.append(F.grid_sample(f, grid, align_corners=False))
        return self.head(self.mix(torch.cat(samples, 1)).relu())


@network(FAMILY, *IMAGES)
class InterleavedGLU(nn.Module):
    """Values in even channels, gates in odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.both = nn.Conv2d(8, 16, 3, 1, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(self.stem(x))
        return self.head(y[:, 0::2] * y[:, 1::2].sigmoid())


@network(FAMILY, *IMAGES)
class InterleavedGLUByView(nn.Module):
    """Values and gates as the last axis of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.both = nn.Conv2d(8, 16, 3, 1, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(self.stem(x))
        value, gate = y.view(y.shape[0], -1, 2, *y.shape[2:]).unbind(2)
        return self.head(value * gate.sigmoid())


@network(FAMILY, *IMAGES)
class StackedHeads(nn.Module):
    """Three heads in one tensor, output by output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 12)
        self.hidden = nn.ModuleList(unit(12, 6) for _ in range(3))
        self.heads = nn.ModuleList(nn.Conv2d(6, 2, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        result = [h(b(x)) for b, h in zip(self.hidden, self.heads, strict=True)]
        return torch.stack(result, 1).flatten(1, 2)


@network(FAMILY, *IMAGES)
class ColumnStack(nn.Module):
    """Features of two pools, stacked and flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 8), unit(8, 8))
        self.fc = nn.Linear(16, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        f = self.stem(x)
        both = torch.stack((f.mean((2, 3)), f.amax((2, 3))), dim=2)
        return self.head(self.fc(both.flatten(1)).relu())


@network(FAMILY, *IMAGES)
class StackedStatistics(nn.Module):
    """Mean and deviation side by side, statistics first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 8), unit(8, 10))
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        f = self.stem(x)
        both = torch.stack((f.mean((2, 3)), f.std((2, 3))), dim=1)
        return self.head(both.flatten(1))


@network(FAMILY, signal(), signal(length=80, batch=3))
class InterleavedSignals(nn.Module):
    """Even and odd samples of a signal by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Conv1d(1, 8, 3, 1, 1), nn.Conv1d(1, 8, 3, 1, 1)
        self.mix = nn.Conv1d(8, 8, 3, 1, 1)
        self.head = nn.Conv1d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([self.even(x), self.odd(x)], -1).flatten(2)
        return self.head(self.mix(y).relu())


@network(FAMILY, *IMAGES)
class StridedWrites(nn.Module):
    """Two layers write into every second channel of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(3, 8)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        y = a.new_zeros(a.shape[0], 16, *a.shape[2:])
        y[:, 0::2] = a
        y[:, 1::2] = b
        return self.head(y)


@network(FAMILY, *IMAGES)
class RepeatInterleave(nn.Module):
    """Every channel twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.mix = unit(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.stem(x).repeat_interleave(2, 1)))


@network(FAMILY, *IMAGES)
class TiledChannels(nn.Module):
    """All channels twice, one block after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.mix = unit(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.stem(x).repeat(1, 2, 1, 1)))


@network(FAMILY, *IMAGES)
class RotaryPairs(nn.Module):
    """Pairs of features are rotated, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU())
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.3
        a, b = x[..., 0::2], x[..., 1::2]
        turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
        return torch.stack(turned, -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        t = self.stem(x).flatten(2).transpose(1, 2)
        q, k, v = self.turned(self.q(t)), self.turned(self.k(t)), self.v(t)
        attention = (q @ k.transpose(1, 2) / 3).softmax(-1)
        return self.head((attention @ v).mean(1))
