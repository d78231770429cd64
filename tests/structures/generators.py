"""Generators and decoders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import floats, image, network, pooled, together, unit

FAMILY = "generators"
IMAGES = (image(), image(size=24, batch=3))


class Modulated(nn.Module):
    """StyleGAN2: the style scales the kernel's inputs, then each filter is normalised."""

    def __init__(self, style: int, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(after, before, 3, 3) * 0.3)
        self.style = nn.Linear(style, before)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        n, c, h, w = x.shape
        kernel = self.weight * (self.style(style) + 1)[:, None, :, None, None]
        kernel = kernel * (kernel.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        y = F.conv2d(x.reshape(1, n * c, h, w), kernel.flatten(0, 1), padding=1, groups=n)
        return y.view(n, -1, h, w)


@network(FAMILY, floats(2, 6), floats(3, 6))
class StyleGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 8))
        self.constant = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.a, self.b = Modulated(8, 8, 8), Modulated(8, 8, 8)
        self.to_rgb = nn.Conv2d(8, 3, 1)

    def forward(self, z: Tensor) -> Tensor:
        style = self.mapping(z)
        x = self.constant.expand(z.shape[0], -1, -1, -1)
        x = F.leaky_relu(self.a(x, style), 0.2)
        x = F.leaky_relu(self.b(F.interpolate(x, scale_factor=2.0), style), 0.2)
        return self.to_rgb(x)


@network(FAMILY, *IMAGES)
class ModulatedWithoutNorm(nn.Module):
    """Activations are scaled by the style, not kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.style = unit(3, 8), nn.Linear(8, 8)
        self.mix, self.head = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.mix(x * (1 + self.style(pooled(x)))[..., None, None])
        return self.head(y.relu())


@network(FAMILY, *IMAGES)
class Pix2Pix(nn.Module):
    """A U-Net of strided and transposed layers, instance norms and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2 = nn.Conv2d(3, 8, 4, 2, 1), nn.Conv2d(8, 12, 4, 2, 1)
        self.n1, self.n2 = nn.InstanceNorm2d(12, affine=True), nn.InstanceNorm2d(8)
        self.u1 = nn.ConvTranspose2d(12, 8, 4, 2, 1)
        self.u2 = nn.ConvTranspose2d(16, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.leaky_relu(self.d1(x), 0.2)
        b = F.leaky_relu(self.n1(self.d2(a)), 0.2)
        c = self.n2(self.u1(b)).relu()
        return self.u2(torch.cat([c, a], 1)).tanh()


@network(FAMILY, *IMAGES)
class SuperResolution(nn.Module):
    """ESPCN and EDSR: residual blocks, pixel shuffle, the upscaled input added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
            for _ in range(2)
        )
        self.up = nn.Sequential(nn.Conv2d(8, 32, 3, 1, 1), nn.PixelShuffle(2))
        self.head = nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        for block in self.blocks:
            y = y + 0.1 * block(y)
        return self.head(self.up(y)) + F.interpolate(x, scale_factor=2.0, mode="bicubic")


@network(FAMILY, *IMAGES)
class ShuffledOutput(nn.Module):
    """Pixel shuffle is the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(unit(3, 8), unit(8, 8), nn.Conv2d(8, 12, 1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@network(FAMILY, together(image(), floats(2, 5)), together(image(size=20, batch=3), floats(3, 5)))
class FeatureModulation(nn.Module):
    """FiLM: scale and shift from a condition, as one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.film = unit(3, 8), nn.Linear(5, 16)
        self.mix, self.head = unit(8, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition)[..., None, None].chunk(2, 1)
        return self.head(self.mix(self.stem(x) * (1 + scale) + shift))


@network(FAMILY, together(image(), image()), together(image(size=20), image(size=20)))
class AdaptiveInstanceNorm(nn.Module):
    """AdaIN: one image takes the statistics of another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(unit(3, 8), unit(8, 8))
        self.decoder = nn.Sequential(unit(8, 8), nn.Conv2d(8, 3, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.encoder(x), self.encoder(y)
        a = (a - a.mean((2, 3), True)) / (a.std((2, 3), keepdim=True) + 1e-3)
        return self.decoder(a * b.std((2, 3), keepdim=True) + b.mean((2, 3), True))


@network(FAMILY, together(image(), floats(2)), together(image(size=24, batch=3), floats(3)))
class DiffusionUNet(nn.Module):
    """Time embedding added to features, group norms, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.norm = nn.GroupNorm(4, 8)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 3, 3, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        steps = t[:, None] * torch.arange(1, 5, dtype=t.dtype)
        e = self.time(torch.cat([steps.sin(), steps.cos()], 1))
        a = F.silu(self.a(x))
        b = F.silu(self.norm(self.b(a) + e[..., None, None]))
        return self.head(torch.cat([self.up(b), a], 1))


@network(FAMILY, floats(2, 6), floats(4, 6))
class DeepConvolutionalGenerator(nn.Module):
    """DCGAN: a vector becomes an image through a reshape to 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(6, 8 * 16)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(self.start(z).view(-1, 8, 4, 4))


@network(FAMILY, *IMAGES)
class NoiseInjection(nn.Module):
    """Noise of one channel, weighted for each, added in training and eval."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.strength = unit(3, 8), nn.Parameter(torch.rand(1, 8, 1, 1))
        self.mix, self.head = unit(8, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        noise = torch.randn(x.shape[0], 1, *x.shape[2:], dtype=x.dtype)
        return self.head(self.mix(x + self.strength * noise))


@network(FAMILY, image(size=16), image(size=24))
class MinibatchDeviation(nn.Module):
    """A discriminator that adds the batch's deviation as a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(9, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        spread = x.std(0).mean().expand(x.shape[0], 1, *x.shape[2:])
        return self.head(pooled(self.b(torch.cat([x, spread], 1))))


@network(FAMILY, *IMAGES)
class PixelNorm(nn.Module):
    """Every pixel's features have length one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x * (x.pow(2).mean(1, keepdim=True) + 1e-8).rsqrt()
        return self.head(self.b(x))


@network(FAMILY, *IMAGES)
class SpatiallyAdaptiveNorm(nn.Module):
    """SPADE: scale and shift of every pixel from a map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = unit(3, 8), nn.BatchNorm2d(8, affine=False)
        self.shared = nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1), nn.ReLU())
        self.gamma, self.beta = nn.Conv2d(6, 8, 3, 1, 1), nn.Conv2d(6, 8, 3, 1, 1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = self.shared(x)
        y = self.norm(self.stem(x)) * (1 + self.gamma(s)) + self.beta(s)
        return self.head(y.relu())


@network(FAMILY, floats(2, 2, 30), floats(1, 2, 40))
class ImplicitField(nn.Module):
    """NeRF-like: coordinates with sines, a skip into the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(20, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        p = torch.cat([x.sin(), x.cos(), (2 * x).sin(), (2 * x).cos()], -1)
        h = self.a(p).relu()
        return self.head(self.b(torch.cat([h, p], -1)).relu())
