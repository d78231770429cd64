"""Products, distances, masks and in-place operators between layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .operators_space import Between
from .registry import image, network, pooled, unit

FAMILY = "operators"
IMAGES = (image(), image(size=20, batch=3))


@network(FAMILY, *IMAGES)
class BilinearPooling(nn.Module):
    """Products of all pairs of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 6), nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = self.b(self.a(x)).flatten(2)
        return self.head((f @ f.mT / f.shape[2]).flatten(1))


@network(FAMILY, *IMAGES)
class BilinearModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(3, 6)
        self.both, self.head = nn.Bilinear(8, 6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.both(pooled(self.a(x)), pooled(self.b(x))).relu())


@network(FAMILY, *IMAGES)
class EinsumLayers(nn.Module):
    """Dense and pointwise layers written as einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.w1 = nn.Parameter(torch.randn(8, 12) * 0.3)
        self.w2 = nn.Parameter(torch.randn(6, 12) * 0.3)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("nchw,cd->ndhw", self.stem(x), self.w1).relu()
        return self.head(torch.einsum("od,ndhw->nohw", self.w2, x).relu())


@network(FAMILY, *IMAGES)
class EinsumHeads(nn.Module):
    """Weights with an axis of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(8, 2, 4) * 0.3) for _ in range(3))
        self.out, self.head = nn.Parameter(torch.randn(2, 4, 8) * 0.3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).mT
        q, k, v = (torch.einsum("nsc,chd->nhsd", t, w) for w in (self.q, self.k, self.v))
        y = torch.einsum(
            "nhst,nhtd->nhsd", (torch.einsum("nhsd,nhtd->nhst", q, k) / 2).softmax(-1), v
        )
        return self.head(torch.einsum("nhsd,hdc->nsc", y, self.out).mean(1))


@network(FAMILY, *IMAGES)
class GroupedEinsum(nn.Module):
    """'bgchw,gco->bgohw' over groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.weight = nn.Parameter(torch.randn(2, 4, 5) * 0.4)
        self.head = nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).unflatten(1, (2, -1))
        return self.head(torch.einsum("bgchw,gco->bgohw", y, self.weight).flatten(1, 2).relu())


@network(FAMILY, *IMAGES)
class InPlace(nn.Module):
    """relu_, add_, mul_, clamp_ and squeeze_ on features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, 8, 3, 1, 1) for i in (3, 8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu_()
        y = self.b(x)
        y.add_(x).mul_(0.5).clamp_(max=4)
        y = F.adaptive_avg_pool2d(self.c(y), 1).squeeze_(-1).squeeze_(-1)
        return self.head(y)


@network(FAMILY, *IMAGES)
class WritesSlices(Between):
    """Rows of a feature map are overwritten."""

    def between(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, :, 0] = 0
        y[..., -1] += x[..., 0]
        return y


@network(FAMILY, *IMAGES)
class ChannelsLastCode(nn.Module):
    """Everything in NHWC, layers as linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = nn.Conv2d(3, 8, 3, 1, 1), nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).permute(0, 2, 3, 1)
        x = self.down(F.gelu(self.up(x))) + x
        return self.head(x.flatten(1, 2).mean(1))


@network(FAMILY, *IMAGES)
class ChannelsOnBatchAxis(Between):
    """Channels join the batch and part again."""

    def between(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = F.avg_pool2d(x.reshape(n * c, 1, h, w), 3, 1, 1)
        return y.view(n, c, h, w)


@network(FAMILY, *IMAGES)
class SpaceAsMatrix(nn.Module):
    """A learnt matrix over pixels, at one size, beside a channel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.pool = unit(3, 8), nn.AdaptiveAvgPool2d(4)
        self.mix, self.b, self.head = nn.Linear(16, 16), nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = self.pool(self.a(x)).flatten(2)
        return self.head(self.b(self.mix(f).mT).relu().amax(1))


@network(FAMILY, *IMAGES)
class CosineClassifier(nn.Module):
    """Normalised features times normalised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(8, 8)
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        f = pooled(self.b(self.a(x)))
        return 10 * F.linear(F.normalize(f, dim=1), F.normalize(self.weight, dim=1))


@network(FAMILY, *IMAGES)
class PrototypeDistances(nn.Module):
    """Distances to learnt prototypes by cdist."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(8, 8)
        self.prototypes = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(pooled(self.b(self.a(x))), self.prototypes)


@network(FAMILY, *IMAGES)
class CorrelationVolume(nn.Module):
    """RAFT: features of shifted images multiplied and summed over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(unit(3, 8), nn.Conv2d(8, 6, 1))
        self.mix, self.head = unit(9, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.encoder(x), self.encoder(x.flip(3))
        costs = [(a * b.roll((i, j), (2, 3))).sum(1) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        return self.head(self.mix(torch.stack(costs, 1)))


@network(FAMILY, *IMAGES)
class LocalResponse(Between):
    """Normalisation over neighbouring channels."""

    def between(self, x: Tensor) -> Tensor:
        return F.local_response_norm(x, 3)


@network(FAMILY, *IMAGES)
class WhereAndMasks(Between):
    def between(self, x: Tensor) -> Tensor:
        bright = x.mean((2, 3), keepdim=True)
        return torch.where(x > bright, x, 0.1 * x).masked_fill(x < 0.05, 0.0)


@network(FAMILY, *IMAGES)
class LogSumExpPooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)).flatten(2).logsumexp(2))


@network(FAMILY, *IMAGES)
class GeneralisedMean(nn.Module):
    """GeM pooling with a learnt power."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)
        self.power = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: Tensor) -> Tensor:
        f = self.b(self.a(x)).clamp(min=1e-6)
        return self.head(f.pow(self.power).mean((2, 3)).pow(1 / self.power))


@network(FAMILY, *IMAGES)
class Checkpointed(nn.Module):
    """Activation checkpointing around a block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            x = torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=False)
        else:
            x = self.b(x)
        return self.head(x)


class Straight(torch.autograd.Function):
    """Rounds forward, passes gradients back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@network(FAMILY, *IMAGES)
class OwnFunction(Between):
    def between(self, x: Tensor) -> Tensor:
        return Straight.apply(x * 4) / 4
