"""Weights that are shared, or computed from others before use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import floats, image, integers, network, pooled, unit

IMAGES = (image(), image(size=20, batch=3))
TIED, COMPUTED = "tied weights", "computed weights"


@network(TIED, floats(4, 12), floats(7, 12))
class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(12, 8)
        self.bias = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encoder(x).relu(), self.encoder.weight.t(), self.bias)


@network(TIED, floats(4, 12), floats(7, 12))
class TiedDeepAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = self.second(self.first(x).relu()).relu()
        return ((z @ self.second.weight).relu()) @ self.first.weight


@network(TIED, *IMAGES)
class TiedConvolutions(nn.Module):
    """The decoder transposes the encoder's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 6, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.b(self.a(x).relu()).relu()
        y = F.conv_transpose2d(z, self.b.weight, padding=1).relu()
        return F.conv_transpose2d(y, self.a.weight, padding=1)


@network(TIED, *IMAGES)
class TiedLayers(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.a, self.b = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.b.weight = self.a.weight
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.stem(x)).relu()).relu())


@network(TIED, integers(11, 3, 9), integers(11, 2, 14))
class TiedEmbedding(nn.Module):
    """A language model whose output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 12, 3, 1, 1)
        self.back = nn.Conv1d(12, 8, 1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)
        return self.head(e + self.back(self.conv(e.mT).relu()).mT)


@network(TIED, *IMAGES)
class SharedBlock(nn.Module):
    """One block three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = unit(3, 8), unit(8, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


@network(TIED, *IMAGES)
class SharedHeadOverScales(nn.Module):
    """One head for two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(8, 8, stride=2)
        self.head = nn.Sequential(unit(8, 8), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        a = self.a(x)
        return [self.head(a), self.head(self.b(a))]


class LowRankLinear(nn.Module):
    """A linear layer with a low-rank branch, added to its output or to its weight."""

    def __init__(self, into: int, out: int, merged: bool) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(into, out), merged
        self.a = nn.Parameter(torch.randn(3, into) * 0.3)
        self.b = nn.Parameter(torch.randn(out, 3) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + 0.5 * (self.b @ self.a), self.base.bias)
        return self.base(x) + 0.5 * F.linear(F.linear(x, self.a), self.b)


class LowRankNet(nn.Module):
    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.up, self.head = LowRankLinear(8, 12, merged), LowRankLinear(12, 5, merged)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(pooled(self.stem(x))).relu())


@network(COMPUTED, *IMAGES)
def lo_ra_live() -> nn.Module:
    return LowRankNet(False)


@network(COMPUTED, *IMAGES)
def lo_ra_merged() -> nn.Module:
    return LowRankNet(True)


@network(COMPUTED, *IMAGES)
class LoRAConvolution(nn.Module):
    """A low-rank branch of two convolutions beside one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.base = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1)
        self.down, self.up = nn.Conv2d(8, 2, 3, 1, 1, bias=False), nn.Conv2d(2, 8, 1, bias=False)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((self.base(x) + self.up(self.down(x))).relu())


@network(COMPUTED, *IMAGES)
class BasePlusDelta(nn.Module):
    """A frozen weight and what is learnt on top."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.register_buffer("base", torch.randn(8, 8, 3, 3) * 0.2)
        self.delta = nn.Parameter(torch.randn(8, 8, 3, 3) * 0.1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(self.stem(x), self.base + self.delta, padding=1)
        return self.head(y.relu())


@network(COMPUTED, *IMAGES)
class RepVGGSum(nn.Module):
    """Three branches with batch norms, added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.wide = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.thin = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.same = nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((self.wide(x) + self.thin(x) + self.same(x)).relu())


@network(COMPUTED, *IMAGES)
class PaddedKernelSum(nn.Module):
    """A 1x1 kernel padded to 3x3 and added to another before use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.wide, self.thin = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.wide.weight + F.pad(self.thin.weight, (1, 1, 1, 1))
        y = F.conv2d(self.stem(x), kernel, self.wide.bias + self.thin.bias, padding=1)
        return self.head(y.relu())


class StandardisedConv(nn.Conv2d):
    """Every filter has mean 0 and deviation 1."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        mean = w.mean((1, 2, 3), keepdim=True)
        w = (w - mean) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


@network(COMPUTED, *IMAGES)
def weight_standardisation() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), StandardisedConv(8, 8, 3, 1, 1), nn.ReLU(),
        nn.Conv2d(8, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 4, 1),
    )  # fmt: skip


@network(COMPUTED, *IMAGES)
class ScaledWeights(nn.Module):
    """StyleGAN's equalised learning rate: a constant times the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = F.conv2d(x, layer.weight * 0.7, layer.bias * 0.5, padding=1).relu()
        return self.head(x)


@network(COMPUTED, *IMAGES)
class ScaledByFanIn(nn.Module):
    """The scale is computed from the weight's own shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            w = layer.weight
            x = F.conv2d(x, w * w[0].numel() ** -0.5 * 3, layer.bias, padding=1).relu()
        return self.head(x)


@network(COMPUTED, *IMAGES)
class BinaryWeights(nn.Module):
    """Signs times a mean magnitude for each filter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = self.mix.weight
        binary = w.sign() * w.abs().mean((1, 2, 3), keepdim=True)
        y = F.conv2d(self.stem(x), w + (binary - w).detach(), self.mix.bias, padding=1)
        return self.head(y.relu())


@network(COMPUTED, *IMAGES)
class MaskedKernels(nn.Module):
    """PixelCNN: half of every kernel is masked by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        mask = torch.ones(1, 1, 3, 3)
        mask[..., 1, 1:], mask[..., 2, :] = 0, 0
        self.register_buffer("mask", mask)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = F.conv2d(x, layer.weight * self.mask, layer.bias, padding=1).relu()
        return self.head(x)


@network(COMPUTED, *IMAGES)
class FullMask(nn.Module):
    """A sparse weight: a mask of the weight's own shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1)
        self.register_buffer("mask", (torch.rand(8, 8, 3, 3) > 0.3).float())
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(self.stem(x), self.mix.weight * self.mask, self.mix.bias, padding=1)
        return self.head(y.relu())


@network(COMPUTED, *IMAGES)
class KernelBank(nn.Module):
    """CondConv: kernels mixed by the input's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.route = unit(3, 8), nn.Linear(8, 3)
        self.bank = nn.Parameter(torch.randn(3, 8, 8, 3, 3) * 0.2)
        self.after, self.head = unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        weights = self.route(pooled(x)).softmax(1)
        kernels = (weights @ self.bank.flatten(1)).view(n * 8, 8, 3, 3)
        y = F.conv2d(x.reshape(1, n * c, h, w), kernels, padding=1, groups=n)
        return self.head(self.after(y.view(n, 8, h, w)))


@network(COMPUTED, *IMAGES)
class HyperNetwork(nn.Module):
    """A small network makes the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.code = unit(3, 8), nn.Parameter(torch.randn(4))
        self.hyper = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 8 * 8))
        self.after, self.head = unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = self.hyper(self.code).view(8, 8, 1, 1)
        return self.head(self.after(F.conv2d(self.stem(x), w).relu()))


@network(COMPUTED, *IMAGES)
class FactorisedKernel(nn.Module):
    """A weight that is a product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.left = nn.Parameter(torch.randn(8, 4) * 0.4)
        self.right = nn.Parameter(torch.randn(4, 8) * 0.4)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = (self.left @ self.right)[:, :, None, None]
        return self.head(F.conv2d(self.stem(x), w).relu())


@network(COMPUTED, *IMAGES)
class FoldedNorm(nn.Module):
    """A batch norm folded into its convolution while running."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.norm = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        scale = n.weight / (n.running_var + n.eps).sqrt()
        w = self.conv.weight * scale.view(-1, 1, 1, 1)
        b = (self.conv.bias - n.running_mean) * scale + n.bias
        return self.head(F.conv2d(self.stem(x), w, b, padding=1).relu())


@network(COMPUTED, *IMAGES)
class ConcatenatedWeights(nn.Module):
    """Two weights as one, outputs split again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = unit(3, 8), nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = torch.cat([self.a.weight, self.b.weight])
        a, b = F.conv2d(self.stem(x), w).chunk(2, 1)
        return self.head(a * b.sigmoid())
