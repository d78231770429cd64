"""Sizes and layers that only training needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .registry import image, network, pooled, unit

FAMILY = "training only"
IMAGES = (image(), image(size=20, batch=3))


@network(FAMILY, *IMAGES)
class FixedNoise(nn.Module):
    """Noise of a fixed width, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            x = x + 0.1 * torch.randn(1, 8, 1, 1)
        return self.head(self.b(x))


@network(FAMILY, *IMAGES)
class FixedDropMask(nn.Module):
    """Channels dropped in training by a mask of the remembered width."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        if self.training:
            x = x * (torch.rand(x.shape[0], self.width, 1, 1) > 0.2)
        return self.head(x)


@network(FAMILY, *IMAGES)
class AuxiliaryHead(nn.Module):
    """A second classifier with layers of its own, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)
        self.aux = nn.Sequential(unit(8, 6, 1), nn.Conv2d(6, 4, 1))

    def forward(self, x: Tensor) -> Any:
        f = self.a(x)
        y = self.head(pooled(self.b(f)))
        return (y, self.aux(f)) if self.training else y


@network(FAMILY, *IMAGES)
class AuxiliaryByView(nn.Module):
    """The training branch reshapes by a fixed width."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)
        self.aux = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        f = self.b(self.a(x))
        y = self.head(pooled(f))
        return (y, self.aux(f.view(f.shape[0], 8, -1).mean(2))) if self.training else y


@network(FAMILY, *IMAGES)
class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.blocks = nn.ModuleList(nn.Sequential(unit(8, 8), nn.Conv2d(8, 8, 1)) for _ in range(3))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or float(torch.rand(())) > 0.3:
                x = x + block(x)
        return self.head(x)


@network(FAMILY, *IMAGES)
class CentreLoss(nn.Module):
    """Centres of the features' width, used by a loss in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)
        self.centres = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Any:
        f = pooled(self.b(self.a(x)))
        y = self.head(f)
        if not self.training:
            return y
        return y, (f[:, None] - self.centres).pow(2).sum(-1).amin(1)


@network(FAMILY, *IMAGES)
class ShakeShake(nn.Module):
    """Two branches mixed at random in training, evenly in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = unit(3, 8), unit(8, 8), unit(8, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        mix = torch.rand(x.shape[0], 1, 1, 1) if self.training else 0.5
        return self.head(x + mix * self.a(x) + (1 - mix) * self.b(x))


@network(FAMILY, *IMAGES)
class GhostBatches(nn.Module):
    """Different layers in training and eval."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.folded = (
            unit(3, 8),
            nn.Conv2d(8, 8, 3, 1, 1),
            nn.Conv2d(8, 8, 3, 1, 1),
        )
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head((self.mix if self.training else self.folded)(x).relu())


@network(FAMILY, *IMAGES)
class DropBlock(nn.Module):
    """Spatial dropout modules of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            unit(3, 8), nn.Dropout2d(0.2), unit(8, 8), nn.AlphaDropout(0.1), unit(8, 8),
            nn.FeatureAlphaDropout(0.1), nn.Conv2d(8, 4, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
