"""Networks whose output is an image of classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, unit

FAMILY = "segmentation"
IMAGES = (image(), image(size=24, batch=3))


@network(FAMILY, *IMAGES)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = unit(3, 8), unit(8, 12), unit(12, 16)
        self.up1, self.up2 = nn.ConvTranspose2d(16, 12, 2, 2), nn.ConvTranspose2d(12, 8, 2, 2)
        self.d, self.e, self.head = unit(24, 12), unit(16, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([self.up1(c), b], 1))
        return self.head(self.e(torch.cat([self.up2(d), a], 1)))


@network(FAMILY, *IMAGES)
class AttentionUNet(nn.Module):
    """Gates on the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(8, 12)
        self.g, self.s, self.gate = nn.Conv2d(12, 6, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 1, 1)
        self.c, self.head = unit(20, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = F.interpolate(self.b(F.max_pool2d(a, 2)), size=a.shape[2:], mode="bilinear")
        gate = self.gate((self.g(b) + self.s(a)).relu()).sigmoid()
        return self.head(self.c(torch.cat([b, a * gate], 1)))


@network(FAMILY, *IMAGES)
class AtrousPyramid(nn.Module):
    """ASPP: dilated branches and the image's mean, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 6, 3, 1, d, d), nn.BatchNorm2d(6), nn.ReLU())
            for d in (1, 2, 3)
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 6, 1), nn.ReLU())
        self.project, self.head = unit(24, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = self.stem(x)
        parts = [b(f) for b in self.branches]
        parts.append(F.interpolate(self.pool(f), size=f.shape[2:], mode="bilinear"))
        return self.head(self.project(torch.cat(parts, 1)))


@network(FAMILY, *IMAGES)
class PyramidPooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.levels = nn.ModuleList(nn.Conv2d(8, 2, 1) for _ in range(3))
        self.sizes = (1, 2, 4)
        self.mix, self.head = unit(14, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = self.stem(x)
        parts = [f]
        for size, level in zip(self.sizes, self.levels, strict=True):
            pooled = level(F.adaptive_avg_pool2d(f, size))
            parts.append(F.interpolate(pooled, size=f.shape[2:], mode="bilinear"))
        return self.head(self.mix(torch.cat(parts, 1)))


@network(FAMILY, *IMAGES)
class HighResolution(nn.Module):
    """HRNet: two resolutions that exchange what they find."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = unit(3, 8), unit(8, 12, stride=2)
        self.high2, self.low2 = unit(8, 8), unit(12, 12)
        self.down, self.up = nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 8, 1)
        self.head = nn.Conv2d(20, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.high(x)
        low = self.low(h)
        h2, l2 = self.high2(h), self.low2(low)
        h = (h2 + F.interpolate(self.up(l2), size=h2.shape[2:])).relu()
        low = (l2 + self.down(h2)).relu()
        return self.head(torch.cat([h, F.interpolate(low, size=h.shape[2:])], 1))


@network(FAMILY, *IMAGES)
class IndexUnpooling(nn.Module):
    """SegNet: maxima go back to where they came from."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, index = F.max_pool2d(self.a(x), 2, return_indices=True)
        return self.head(self.b(F.max_unpool2d(y, index, 2)))


@network(FAMILY, *IMAGES)
class PointwiseRefinement(nn.Module):
    """PointRend: the most uncertain pixels are predicted again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.coarse = unit(3, 8), nn.Conv2d(8, 2, 1)
        self.point = nn.Sequential(nn.Conv1d(10, 8, 1), nn.ReLU(), nn.Conv1d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        f = self.stem(x)
        coarse = self.coarse(f)
        unsure = -(coarse[:, 0] - coarse[:, 1]).abs().flatten(1)
        index = unsure.topk(6).indices[:, None]
        both = torch.cat([f, coarse], 1).flatten(2)
        points = self.point(both.gather(2, index.expand(-1, both.shape[1], -1)))
        flat = coarse.flatten(2).scatter(2, index.expand(-1, 2, -1), points)
        return flat.view_as(coarse)


@network(FAMILY, *IMAGES)
class MaskQueries(nn.Module):
    """MaskFormer: queries times pixels, whose width both layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pixels = unit(3, 8), nn.Conv2d(8, 6, 1)
        self.queries = nn.Parameter(torch.randn(4, 8))
        self.embed = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("qc,nchw->nqhw", self.embed(self.queries), self.pixels(self.stem(x)))


@network(FAMILY, *IMAGES)
class TwoBranches(nn.Module):
    """BiSeNet: a detailed and a deep branch, multiplied by each other's gates."""

    def __init__(self) -> None:
        super().__init__()
        self.detail, self.deep = (
            unit(3, 8, stride=2),
            nn.Sequential(unit(3, 8, stride=2), unit(8, 8, stride=2)),
        )
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.detail(x), self.deep(x)
        up = F.interpolate(self.b(b), size=a.shape[2:], mode="bilinear").sigmoid()
        return F.interpolate(self.head(self.a(a) * up), size=x.shape[2:], mode="bilinear")
