"""Blocks of well-known classifiers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, pooled, unit

FAMILY = "classifiers"
IMAGES = (image(), image(size=24, batch=3))


class Residual(nn.Module):
    """Two layers and a shortcut: identity, projection, or padding with zeros."""

    def __init__(self, before: int, after: int, stride: int = 1, kind: str = "identity") -> None:
        super().__init__()
        self.layers = nn.Sequential(
            unit(before, after, stride=stride),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.project = nn.Conv2d(before, after, 1, stride) if kind == "project" else None
        self.extra, self.stride = after - before, stride

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        if self.project is not None:
            return (y + self.project(x)).relu()
        x = x[:, :, :: self.stride, :: self.stride]
        return (y + F.pad(x, (0, 0, 0, 0, 0, self.extra))).relu()


def classifier(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


@network(FAMILY, *IMAGES)
def res_net_projected() -> nn.Module:
    return classifier(
        unit(3, 8), Residual(8, 8), Residual(8, 12, 2, "project"), Residual(12, 12), width=12
    )


@network(FAMILY, *IMAGES)
def res_net_padded() -> nn.Module:
    return classifier(unit(3, 8), Residual(8, 8), Residual(8, 16, 2), Residual(16, 16), width=16)


@network(FAMILY, *IMAGES)
class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, 1, 1, bias=False) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in (0, 2):
            y = self.convs[i](self.norms[i](x).relu())
            x = x + self.convs[i + 1](self.norms[i + 1](y).relu())
        return self.head(pooled(x))


@network(FAMILY, *IMAGES)
class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 6)
        self.layers = nn.ModuleList(unit(6 + 4 * i, 4) for i in range(3))
        self.transition = unit(18, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(pooled(F.avg_pool2d(self.transition(x), 2)))


@network(FAMILY, *IMAGES)
class InceptionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.a = unit(8, 4, 1)
        self.b = nn.Sequential(unit(8, 4, 1), unit(4, 6))
        self.c = nn.Sequential(unit(8, 4, 1), unit(4, 6, 5))
        self.d = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(8, 4, 1))
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(pooled(torch.cat([self.a(x), self.b(x), self.c(x), self.d(x)], 1)))


@network(FAMILY, *IMAGES)
class Res2Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.width = unit(3, 16), 4
        self.steps = nn.ModuleList(unit(4, 4) for _ in range(3))
        self.mix, self.head = unit(16, 16, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first, *rest = torch.split(x, self.width, 1)
        result = [first]
        for part, step in zip(rest, self.steps, strict=True):
            result.append(step(part + result[-1] if len(result) > 1 else part))
        return self.head(pooled(x + self.mix(torch.cat(result, 1))))


@network(FAMILY, *IMAGES)
class ResNeSt(nn.Module):
    """Split attention: two radix branches from one grouped layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = unit(3, 8), unit(8, 16, groups=2)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 16, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.stem(x))
        n, c = y.shape[:2]
        parts = y.view(n, 2, c // 2, *y.shape[2:])
        gate = self.up(self.down(F.adaptive_avg_pool2d(parts.sum(1), 1)).relu())
        gate = gate.view(n, 2, c // 2, 1, 1).softmax(1)
        return self.head(pooled((parts * gate).sum(1)))


@network(FAMILY, *IMAGES)
class GhostNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.primary = unit(3, 8), unit(8, 6, 1)
        self.cheap = unit(6, 6, 3, groups=6)
        self.mix, self.head = unit(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.primary(self.stem(x))
        return self.head(pooled(self.mix(torch.cat([y, self.cheap(y)], 1)[:, :12])))


@network(FAMILY, *IMAGES)
class InvertedResidual(nn.Module):
    """MobileNetV2 and V3: expansion, depthwise layer, linear projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                unit(8, 16, 1), unit(16, 16, 3, groups=16), nn.Hardswish(), nn.Conv2d(16, 8, 1)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(pooled(x))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, 1, 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


@network(FAMILY, *IMAGES)
def conv_ne_xt() -> nn.Module:
    return classifier(nn.Conv2d(3, 8, 4, 4), ConvNeXtBlock(8), ConvNeXtBlock(8), width=8)


@network(FAMILY, image())
class MLPMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))
        self.channels = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = x + self.tokens(self.norms[0](x).mT).mT
        x = x + self.channels(self.norms[1](x))
        return self.head(x.mean(1))


@network(FAMILY, image(), image(batch=3))
class VGGFlattened(nn.Module):
    """The classifier reads every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            unit(3, 8), nn.MaxPool2d(2), unit(8, 12), nn.MaxPool2d(2), unit(12, 12)
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(12 * 16, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


@network(FAMILY, *IMAGES)
class KolmogorovArnold(nn.Module):
    """Every edge has a spline: radial functions of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.register_buffer("centres", torch.linspace(-1, 1, 4))
        self.first, self.second = nn.Linear(8 * 4, 8), nn.Linear(8 * 4, 5)

    def spread(self, x: Tensor) -> Tensor:
        return torch.exp(-(((x[..., None] - self.centres) * 2) ** 2)).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = pooled(self.stem(x)).tanh()
        return self.second(self.spread(self.first(self.spread(x)).tanh()))


@network(FAMILY, *IMAGES)
class Capsules(nn.Module):
    """Primary capsules, a transformation per class, two rounds of routing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.primary = nn.Conv2d(8, 4 * 6, 3, 2, 1)
        self.transform = nn.Parameter(torch.randn(6, 5, 4, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        p = pooled(self.primary(self.stem(x))).view(-1, 6, 4)
        p = p / (1 + p.norm(dim=-1, keepdim=True))
        votes = torch.einsum("npi,pcij->npcj", p, self.transform)
        logits = torch.zeros(votes.shape[:3], dtype=x.dtype)
        for _ in range(2):
            out = (logits.softmax(2)[..., None] * votes).sum(1)
            logits = logits + (votes * out[:, None]).sum(-1)
        return out.norm(dim=-1)


@network(FAMILY, *IMAGES)
class SqueezeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.squeeze = unit(3, 8), unit(8, 4, 1)
        self.left, self.right = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, 1, 1)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = self.squeeze(self.stem(x))
        return pooled(self.head(torch.cat([self.left(s), self.right(s)], 1).relu()))


@network(FAMILY, *IMAGES)
class Maxout(nn.Module):
    """The larger of two channels goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(8, 16, 3, 1, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.stem, self.mix):
            a, b = layer(x).chunk(2, 1)
            x = torch.maximum(a, b)
        return self.head(x)
