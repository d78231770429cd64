"""Weight norm, spectral norm and other parametrizations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

from .registry import image, network, pooled, signal, unit

FAMILY = "parametrized"
IMAGES = (image(), image(size=20, batch=3))
SIGNALS = (signal(), signal(length=80, batch=3))
weight_norm = parametrizations.weight_norm


@network(FAMILY, *SIGNALS)
class WeightNormSignals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            weight_norm(nn.Conv1d(1, 8, 5, 1, 2)),
            nn.LeakyReLU(0.1),
            weight_norm(nn.Conv1d(8, 8, 5, 1, 2)),
            nn.LeakyReLU(0.1),
            weight_norm(nn.Conv1d(8, 1, 5, 1, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).tanh()


@network(FAMILY, *SIGNALS)
class WeightNormSignalsOld(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            old_weight_norm(nn.Conv1d(1, 8, 5, 1, 2)),
            nn.LeakyReLU(0.1),
            old_weight_norm(nn.Conv1d(8, 8, 5, 1, 2)),
            nn.LeakyReLU(0.1),
            old_weight_norm(nn.Conv1d(8, 1, 5, 1, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).tanh()


class HiFiBlock(nn.Module):
    def __init__(self, width: int, norm: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            norm(nn.Conv1d(width, width, 3, 1, d, dilation=d))  # type: ignore[operator]
            for d in (1, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.leaky_relu(x, 0.1))
        return x


class HiFiDecoder(nn.Module):
    """Transposed convolutions under weight norm, then residual blocks that are averaged."""

    def __init__(self, norm: object) -> None:
        super().__init__()
        self.first = norm(nn.Conv1d(4, 16, 7, 1, 3))  # type: ignore[operator]
        self.ups = nn.ModuleList(
            norm(nn.ConvTranspose1d(16 >> i, 8 >> i, 4, 2, 1))  # type: ignore[operator]
            for i in range(2)
        )
        self.blocks = nn.ModuleList(HiFiBlock(8 >> i, norm) for i in range(2) for _ in range(2))
        self.last = norm(nn.Conv1d(4, 1, 7, 1, 3))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            x = (self.blocks[2 * i](x) + self.blocks[2 * i + 1](x)) / 2
        return self.last(F.leaky_relu(x)).tanh()


@network(FAMILY, signal(4, 16), signal(4, 24, 3))
def hi_fi_generator() -> nn.Module:
    return HiFiDecoder(weight_norm)


@network(FAMILY, signal(4, 16), signal(4, 24, 3))
def hi_fi_generator_old() -> nn.Module:
    return HiFiDecoder(old_weight_norm)


@network(FAMILY, *SIGNALS)
class EnCodecLike(nn.Module):
    """Encoder and decoder with ELU, weight norm throughout, and a residual unit in each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            [
                weight_norm(nn.Conv1d(1, 8, 7, 1, 3)),
                weight_norm(nn.Conv1d(8, 4, 3, 1, 1)),
                weight_norm(nn.Conv1d(4, 8, 1)),
                weight_norm(nn.Conv1d(8, 16, 4, 2, 1)),
            ]
        )
        self.decoder = nn.ModuleList(
            [
                weight_norm(nn.ConvTranspose1d(16, 8, 4, 2, 1)),
                weight_norm(nn.Conv1d(8, 4, 3, 1, 1)),
                weight_norm(nn.Conv1d(4, 8, 1)),
                weight_norm(nn.Conv1d(8, 1, 7, 1, 3)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        first, inner, outer, down = self.encoder
        x = first(x)
        x = down(F.elu(x + outer(F.elu(inner(F.elu(x))))))
        up, inner, outer, last = self.decoder
        x = up(F.elu(x))
        return last(F.elu(x + outer(F.elu(inner(F.elu(x))))))


@network(FAMILY, *IMAGES)
class WeightNormLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.hidden = weight_norm(nn.Linear(8, 12))
        self.head = weight_norm(nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(pooled(self.stem(x))).relu())


@network(FAMILY, *IMAGES)
class WeightNormLinearOverInputs(nn.Module):
    """One gain an input feature."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.hidden = weight_norm(nn.Linear(8, 12), dim=1)
        self.head = weight_norm(nn.Linear(12, 5), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(pooled(self.stem(x))).relu())


@network(FAMILY, *IMAGES)
class WeightNormWhole(nn.Module):
    """One gain for the whole weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.mix = old_weight_norm(nn.Conv2d(8, 8, 3, 1, 1), dim=None)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.stem(x)).relu())


@network(FAMILY, *IMAGES)
class WeightNormTransposedPerFilter(nn.Module):
    """A gain a filter of a transposed convolution: the axis that is not the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.up = weight_norm(nn.ConvTranspose2d(8, 8, 2, 2), dim=1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.stem(x)).relu())


@network(FAMILY, *IMAGES)
class WeightNormTransposedOld(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.up = old_weight_norm(nn.ConvTranspose2d(8, 8, 2, 2), dim=1)
        self.head = old_weight_norm(nn.ConvTranspose2d(8, 4, 2, 2), dim=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.stem(x)).relu())


@network(FAMILY, *IMAGES)
class WeightNormGrouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.depthwise = weight_norm(nn.Conv2d(8, 8, 3, 1, 1, groups=8))
        self.grouped = weight_norm(nn.Conv2d(8, 8, 3, 1, 1, groups=2))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.grouped(self.depthwise(self.stem(x)).relu()).relu())


@network(FAMILY, *IMAGES)
class SpectralNormed(nn.Module):
    """A discriminator under spectral norm, beside a layer without."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 1, 1)
        self.mix = parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, 1, 1))
        self.last = nn.Conv2d(8, 8, 3, 1, 1)
        self.head = parametrizations.spectral_norm(nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.mix(F.leaky_relu(self.first(x))))
        return self.head(pooled(self.last(x).relu()))


@network(FAMILY, *IMAGES)
class SpectralNormedOld(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = unit(3, 8)
        self.mix = old_spectral_norm(nn.Conv2d(8, 8, 3, 1, 1))
        self.last = unit(8, 12)
        self.head = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(pooled(self.last(F.leaky_relu(self.mix(self.first(x))))))


class Symmetric(nn.Module):
    """A square matrix from its upper triangle."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


class Standardised(nn.Module):
    """Every filter with mean 0 and deviation 1."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((1, 2, 3), keepdim=True)
        return (x - mean) / (x.std((1, 2, 3), keepdim=True) + 1e-5)


@network(FAMILY, *IMAGES)
class SymmetricLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.mix = nn.Linear(8, 8)
        parametrize.register_parametrization(self.mix, "weight", Symmetric())
        self.hidden, self.head = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.mix(pooled(self.stem(x)))).relu())


@network(FAMILY, *IMAGES)
class ElementwiseParametrizations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        parametrize.register_parametrization(self.a, "weight", Doubled())
        parametrize.register_parametrization(self.b, "weight", Positive())
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()).relu())


@network(FAMILY, *IMAGES)
class StandardisedParametrization(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        parametrize.register_parametrization(self.b, "weight", Standardised())
        self.c, self.head = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.b(self.a(x).relu()).relu()).relu())


@network(FAMILY, *IMAGES)
class OrthogonalLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.mix = parametrizations.orthogonal(nn.Linear(8, 8))
        self.hidden, self.head = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.mix(pooled(self.stem(x)))).relu())


class LowRank(nn.Module):
    """Adds a product of two thin matrices to a weight."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(out, 2) * 0.2)
        self.down = nn.Parameter(torch.randn(2, into) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up @ self.down


@network(FAMILY, *IMAGES)
class LowRankParametrization(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.hidden, self.head = nn.Linear(8, 12), nn.Linear(12, 5)
        parametrize.register_parametrization(self.hidden, "weight", LowRank(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(pooled(self.stem(x))).relu())
