"""Detectors: pyramids, anchors, grids, boxes beside scores."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, unit

FAMILY = "detectors"
IMAGES = (image(size=16), image(size=32, batch=1))


class Backbone(nn.Module):
    """Features at three strides."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [unit(3, 8, stride=2), unit(8, 8, stride=2), unit(8, 12, stride=2)]
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        results = []
        for stage in self.stages:
            x = stage(x)
            results.append(x)
        return results


@network(FAMILY, *IMAGES)
class FeaturePyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.lateral = nn.ModuleList(nn.Conv2d(c, 8, 1) for c in (8, 8, 12))
        self.smooth = nn.ModuleList(nn.Conv2d(8, 8, 3, 1, 1) for _ in range(3))
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = [lat(f) for lat, f in zip(self.lateral, self.backbone(x), strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], size=levels[i].shape[-2:])
        result = [self.head(s(f).relu()) for s, f in zip(self.smooth, levels, strict=True)]
        return {f"p{i}": level for i, level in enumerate(result)}


@network(FAMILY, *IMAGES)
class AnchorHead(nn.Module):
    """YOLOv5: anchors times outputs in one layer, decoded with a grid that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.outputs, self.anchors = Backbone(), 7, 2
        self.heads = nn.ModuleList(nn.Conv2d(c, 14, 1) for c in (8, 12))
        self.register_buffer("sizes", torch.tensor([[10.0, 13], [16, 30]]))
        self.grids: list[Any] = [None, None]

    def forward(self, x: Tensor) -> Any:
        maps, boxes = [], []
        for i, (head, f) in enumerate(zip(self.heads, self.backbone(x)[1:], strict=True)):
            y = head(f)
            n, _, h, w = y.shape
            y = y.view(n, self.anchors, self.outputs, h, w).permute(0, 1, 3, 4, 2).contiguous()
            maps.append(y)
            if self.training:
                continue
            if self.grids[i] is None or self.grids[i].shape[2:4] != y.shape[2:4]:
                ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
                self.grids[i] = torch.stack((xs, ys), -1)[None, None].to(y)
            p = y.sigmoid()
            centre = (p[..., :2] * 2 - 0.5 + self.grids[i].to(y)) * 8
            size = (p[..., 2:4] * 2) ** 2 * self.sizes.view(1, 2, 1, 1, 2)
            boxes.append(torch.cat([centre, size, p[..., 4:]], -1).view(n, -1, self.outputs))
        return maps if self.training else (torch.cat(boxes, 1), maps)


@network(FAMILY, *IMAGES)
class BoxesBesideScores(nn.Module):
    """YOLOv8: boxes in pixels and scores of classes in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.boxes = nn.ModuleList(
            nn.Sequential(unit(c, 8), nn.Conv2d(8, 4, 1)) for c in (8, 8, 12)
        )
        self.scores = nn.ModuleList(
            nn.Sequential(unit(c, 8), nn.Conv2d(8, 6, 1)) for c in (8, 8, 12)
        )

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for f, box, score in zip(self.backbone(x), self.boxes, self.scores, strict=True):
            b = box(f).sigmoid() * 1280
            results.append(torch.cat([b, score(f).sigmoid()], 1).flatten(2))
        return torch.cat(results, 2)


@network(FAMILY, *IMAGES)
class DistributionHead(nn.Module):
    """Distances as expectations over bins, by a fixed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(unit(12, 12), nn.Conv2d(12, 4 * 8, 1))
        self.expect = nn.Conv2d(8, 1, 1, bias=False).requires_grad_(False)
        self.expect.weight.data[:] = torch.arange(8.0).view(1, 8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.backbone(x)[-1]).flatten(2)
        n, _, a = y.shape
        return self.expect(y.view(n, 4, 8, a).transpose(2, 1).softmax(1)).view(n, 4, a)


@network(FAMILY, *IMAGES)
class SingleShot(nn.Module):
    """SSD: permuted and flattened predictions of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.places = nn.ModuleList(nn.Conv2d(c, 3 * 4, 3, 1, 1) for c in (8, 12))
        self.classes = nn.ModuleList(nn.Conv2d(c, 3 * 5, 3, 1, 1) for c in (8, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)[1:]
        n = x.shape[0]
        flat = [
            torch.cat(
                [
                    h(f).permute(0, 2, 3, 1).reshape(n, -1, size)
                    for h, f in zip(heads, features, strict=True)
                ],
                1,
            )
            for heads, size in ((self.places, 4), (self.classes, 5))
        ]
        return flat[0], flat[1].softmax(-1)


@network(FAMILY, *IMAGES)
class CentreNet(nn.Module):
    """Peaks of a heat map, their classes and sizes gathered at the peaks."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.heat = nn.Sequential(unit(8, 8), nn.Conv2d(8, 3, 1))
        self.size = nn.Sequential(unit(8, 8), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = self.backbone(x)[1]
        heat, size = self.heat(f).sigmoid(), self.size(f)
        peaks = heat * (F.max_pool2d(heat, 3, 1, 1) == heat)
        scores, index = peaks.flatten(1).topk(4)
        place = index % heat[0, 0].numel()
        sizes = size.flatten(2).gather(2, place[:, None].expand(-1, 2, -1))
        return scores, index, sizes


@network(FAMILY, *IMAGES)
class SuppressedBoxes(nn.Module):
    """Boxes chosen in Python: a list of tensors whose lengths depend on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(unit(8, 8), nn.Conv2d(8, 5, 1))

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.backbone(x)[1]).flatten(2).mT
        if self.training:
            return y
        results = []
        for one in y:
            order = one[:, 4].argsort(descending=True)[:6]
            chosen = one[order]
            results.append({"boxes": chosen[:, :4] * 100, "scores": chosen[:, 4].sigmoid()})
        return results


@network(FAMILY, *IMAGES)
class ThresholdedBoxes(nn.Module):
    """Only what is above a threshold is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(unit(8, 8), nn.Conv2d(8, 5, 1))

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.backbone(x)[1]).flatten(2).mT.flatten(0, 1)
        return y if self.training else y[y[:, 4] > y[:, 4].mean()]


class SplitBlock(nn.Module):
    """C2f: a width is remembered and used by split."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.c = after // 2
        self.first = unit(before, 2 * self.c, 1)
        self.steps = nn.ModuleList(unit(self.c, self.c) for _ in range(2))
        self.last = unit(4 * self.c, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.first(x).split((self.c, self.c), 1))
        y.extend(step(y[-1]) for step in self.steps)
        return self.last(torch.cat(y, 1))


@network(FAMILY, *IMAGES)
class SplitBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = unit(3, 8), SplitBlock(8, 12), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


@network(FAMILY, *IMAGES)
class FastPyramidPooling(nn.Module):
    """SPPF and a path aggregation of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.squeeze = Backbone(), unit(12, 6, 1)
        self.pool, self.expand = nn.MaxPool2d(5, 1, 2), unit(24, 8, 1)
        self.mix, self.head = SplitBlock(16, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, middle, deep = self.backbone(x)
        parts = [self.squeeze(deep)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        deep = F.interpolate(self.expand(torch.cat(parts, 1)), scale_factor=2.0)
        return self.head(self.mix(torch.cat([middle, deep], 1)))


@network(FAMILY, *IMAGES)
class WeightedFusion(nn.Module):
    """BiFPN: levels weighted by normalised parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.lateral = Backbone(), nn.Conv2d(12, 8, 1)
        self.weights = nn.Parameter(torch.rand(2) + 0.5)
        self.head = nn.Sequential(unit(8, 8), nn.Conv2d(8, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        _, a, b = self.backbone(x)
        w = self.weights.relu() / (self.weights.relu().sum() + 1e-4)
        return self.head(w[0] * a + w[1] * F.interpolate(self.lateral(b), scale_factor=2.0))


@network(FAMILY, *IMAGES)
class RegionFeatures(nn.Module):
    """Fixed regions sampled from a map, then a head over all their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.fc, self.head = nn.Linear(8 * 9, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        f = self.backbone(x)[0]
        h, w = f.shape[2:]
        parts = [f[:, :, : h // 2, : w // 2], f[:, :, h // 2 :, w // 2 :]]
        regions = torch.cat([F.adaptive_max_pool2d(p, 3) for p in parts])
        return self.head(self.fc(regions.flatten(1)).relu())
