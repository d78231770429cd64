"""Operators over space that are rare between layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, pooled, unit

FAMILY = "operators"
IMAGES = (image(), image(size=20, batch=3))


class Between(nn.Module):
    """Two layers, something between them, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.between(self.a(x))))


@network(FAMILY, *IMAGES)
class Quantiles(nn.Module):
    """Quantiles over space as features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = self.b(self.a(x)).flatten(2)
        return self.head(torch.quantile(f, 0.9, dim=2))


@network(FAMILY, image())
class PerSampleGradients(nn.Module):
    """vmap(grad) inside forward: an energy's gradient by the features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = pooled(self.a(x))
        push = torch.func.vmap(torch.func.grad(lambda one: self.b(one).pow(2).sum()))(f)
        return self.head(f - 0.1 * push)


@network(FAMILY, image())
class ReinterpretedBits(Between):
    """view(dtype) to integers and back."""

    def between(self, x: Tensor) -> Tensor:
        kind = torch.int64 if x.dtype == torch.float64 else torch.int32
        return x.view(kind).view(x.dtype)


@network(FAMILY, image())
class ConditionalOperator(Between):
    """torch.cond on the features' mean."""

    def between(self, x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 0, lambda t: t * 2.0, lambda t: t * 0.5, (x,))


@network(FAMILY, *IMAGES)
class UnfoldThenFold(Between):
    def between(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, 2, stride=2)
        return F.fold(columns * 0.5, x.shape[2:], 2, stride=2)


@network(FAMILY, *IMAGES)
class UnfoldAsConvolution(nn.Module):
    """im2col and a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix = unit(3, 8), nn.Linear(8 * 9, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(self.a(x), 3, padding=1).mT
        return self.head(self.mix(columns).relu())


@network(FAMILY, *IMAGES)
class LocalPatches(Between):
    """Neighbourhoods by unfold, averaged: involution without a kernel."""

    def between(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return F.unfold(x, 3, padding=1).view(n, c, 9, h, w).mean(2)


@network(FAMILY, *IMAGES)
class Involution(nn.Module):
    """Kernels for every pixel, made from the features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.kernel = unit(3, 8), nn.Conv2d(8, 2 * 9, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        n, c, h, w = x.shape
        kernels = self.kernel(x).view(n, 2, 1, 9, h, w)
        patches = F.unfold(x, 3, padding=1).view(n, 2, c // 2, 9, h, w)
        return self.head((kernels * patches).sum(3).view(n, c, h, w).relu())


@network(FAMILY, *IMAGES)
class LargestPixels(nn.Module):
    """topk over space, then their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)).flatten(2).topk(5, 2).values.mean(2))


@network(FAMILY, *IMAGES)
class LargestPixelsWeighted(nn.Module):
    """topk over space feeds a layer over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rank, self.head = unit(3, 8), nn.Linear(5, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rank(self.a(x).flatten(2).topk(5).values).squeeze(-1))


@network(FAMILY, *IMAGES)
class SortedPixels(Between):
    def between(self, x: Tensor) -> Tensor:
        return x.sort(dim=3).values


@network(FAMILY, *IMAGES)
class RunningMaximum(Between):
    def between(self, x: Tensor) -> Tensor:
        return x.cummax(3).values + x.cumsum(2) * 0.1


@network(FAMILY, *IMAGES)
class CornerPooling(Between):
    """CornerNet: running maxima from two sides."""

    def between(self, x: Tensor) -> Tensor:
        return x.flip(3).cummax(3).values.flip(3) + x.flip(2).cummax(2).values.flip(2)


@network(FAMILY, *IMAGES)
class GatheredPixels(nn.Module):
    """The brightest pixel's features, by gather with an expanded index."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = self.b(self.a(x)).flatten(2)
        index = x.sum(1).flatten(1).argmax(1)[:, None, None].expand(-1, f.shape[1], 1)
        return self.head(f.gather(2, index).squeeze(2))


@network(FAMILY, *IMAGES)
class FourierConvolution(nn.Module):
    """FFC: real and imaginary parts as channels of a 1 x 1 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.head = unit(3, 8), unit(16, 16, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        f = torch.fft.rfft2(x, norm="ortho")
        f = self.mix(torch.cat([f.real, f.imag], 1))
        real, imaginary = f.chunk(2, 1)
        back = torch.fft.irfft2(torch.complex(real, imaginary), s=x.shape[2:], norm="ortho")
        return self.head(x + back)


@network(FAMILY, *IMAGES)
class FourierOperator(nn.Module):
    """FNO: complex weights on the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.skip = unit(3, 8), nn.Conv2d(8, 8, 1)
        self.weight = nn.Parameter(torch.randn(8, 8, 4, 4, 2) * 0.1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        f = torch.fft.rfft2(x)
        w = torch.view_as_complex(self.weight)
        out = torch.zeros_like(f)
        out[:, :, :4, :4] = torch.einsum("nihw,iohw->nohw", f[:, :, :4, :4], w)
        return self.head((torch.fft.irfft2(out, s=x.shape[2:]) + self.skip(x)).relu())


@network(FAMILY, *IMAGES)
class SpectralFilter(Between):
    """A global filter on frequencies, the same for every channel."""

    def between(self, x: Tensor) -> Tensor:
        f = torch.fft.fft2(x)
        return torch.fft.ifft2(f * 0.9).real


@network(FAMILY, *IMAGES)
class TokensByFourier(nn.Module):
    """FNet: a transform over tokens and channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.up, self.down = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).mT
        t = t + torch.fft.fft(torch.fft.fft(t, dim=-1), dim=-2).real * 0.1
        return self.head((t + self.down(F.gelu(self.up(t)))).mean(1))


@network(FAMILY, *IMAGES)
class BlurPool(nn.Module):
    """A fixed kernel, expanded to the channels, as a depthwise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        k = torch.tensor([1.0, 2, 1])
        self.register_buffer("kernel", (k[:, None] * k)[None, None] / 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        kernel = self.kernel.expand(x.shape[1], -1, -1, -1)
        x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), kernel, stride=2, groups=x.shape[1])
        return self.head(self.b(x))


@network(FAMILY, *IMAGES)
class BlurPoolFixed(nn.Module):
    """The same with the kernel repeated in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        k = torch.tensor([1.0, 2, 1])
        self.register_buffer("kernel", ((k[:, None] * k) / 16).repeat(8, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head(self.b(F.conv2d(x, self.kernel, stride=2, padding=1, groups=x.shape[1])))


@network(FAMILY, *IMAGES)
class UpFirDown(Between):
    """StyleGAN's resampling: zeros between pixels, a filter, every second pixel."""

    def between(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        x = F.pad(x.reshape(n, c, h, 1, w, 1), (0, 1, 0, 0, 0, 1)).reshape(n, c, 2 * h, 2 * w)
        kernel = torch.ones(c, 1, 2, 2, dtype=x.dtype)
        return F.conv2d(F.pad(x, (1, 0, 1, 0)), kernel, groups=c)[:, :, ::2, ::2]


@network(FAMILY, *IMAGES)
class SpatialTransformer(nn.Module):
    """Features moved by a predicted affine map."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.where = unit(3, 8), nn.Linear(8, 6)
        self.b, self.head = unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        theta = self.where(pooled(x)).view(-1, 2, 3).tanh()
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.head(self.b(F.grid_sample(x, grid, align_corners=False)))
