"""Attention: channel gates, spatial gates, and attention over positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, pooled, unit

FAMILY = "attention"
IMAGES = (image(), image(size=24, batch=3))


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int, linear: bool = False) -> None:
        super().__init__()
        self.linear = linear
        make = nn.Linear if linear else (lambda a, b: nn.Conv2d(a, b, 1))
        self.down, self.up = make(width, width // 2), make(width // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        s = pooled(x) if self.linear else F.adaptive_avg_pool2d(x, 1)
        s = self.up(self.down(s).relu()).sigmoid()
        return x * (s[:, :, None, None] if self.linear else s)


@network(FAMILY, *IMAGES)
def squeeze_excite() -> nn.Module:
    return nn.Sequential(unit(3, 8), Gate(8), unit(8, 8), Gate(8, True), nn.Conv2d(8, 4, 1))


@network(FAMILY, *IMAGES)
class ConvolutionalBlockAttention(nn.Module):
    """CBAM: a gate from mean and maximum over space, then one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
        self.spatial = nn.Conv2d(2, 1, 3, 1, 1)
        self.mix, self.head = unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.stem(x))
        gate = (self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3)))).sigmoid()
        x = x * gate[..., None, None]
        both = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return self.head(x * self.spatial(both).sigmoid())


@network(FAMILY, *IMAGES)
class EfficientChannelAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.along = nn.Conv1d(1, 1, 3, 1, 1, bias=False)
        self.mix, self.head = unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.adaptive_avg_pool2d(x, 1).squeeze(-1).transpose(1, 2)
        y = self.along(y).transpose(1, 2).unsqueeze(-1).sigmoid()
        return self.head(self.mix(x * y))


@network(FAMILY, *IMAGES)
class SelectiveKernel(nn.Module):
    """Two kernels, weighted by a softmax over the two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(3, 8, 5)
        self.squeeze = nn.Linear(8, 4)
        self.choose = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.a(x), self.b(x)], 1)
        s = self.squeeze(both.sum(1).mean((2, 3))).relu()
        weights = torch.stack([c(s) for c in self.choose], 1).softmax(1)
        return self.head((both * weights[..., None, None]).sum(1))


@network(FAMILY, *IMAGES)
class CoordinateAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.squeeze = unit(3, 8), unit(8, 4, 1)
        self.rows, self.columns = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h, w = x.shape[2:]
        rows, columns = x.mean(3, keepdim=True), x.mean(2, keepdim=True).permute(0, 1, 3, 2)
        a, b = self.squeeze(torch.cat([rows, columns], 2)).split([h, w], 2)
        return self.head(x * self.rows(a).sigmoid() * self.columns(b.mT).sigmoid())


@network(FAMILY, *IMAGES)
class NonLocal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8, stride=2)
        self.q, self.k, self.v = (nn.Conv2d(8, 6, 1) for _ in range(3))
        self.out, self.head = nn.Conv2d(6, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = (f(x).flatten(2) for f in (self.q, self.k, self.v))
        y = v @ (q.transpose(1, 2) @ k).softmax(-1).transpose(1, 2)
        return self.head(x + self.out(y.view(y.shape[0], -1, *x.shape[2:])))


@network(FAMILY, *IMAGES)
class DualAttention(nn.Module):
    """Attention between channels: what is asked for is a matrix of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        f = x.flatten(2)
        weights = (f @ f.transpose(1, 2) / f.shape[2]).softmax(-1)
        return self.head(self.mix(x + (weights @ f).view_as(x)))


class Patches(nn.Module):
    """Tokens from an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, width, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(2).transpose(1, 2)


class Attend(nn.Module):
    """Several heads, plain or fused."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, -1))


class Transformer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.patches = Patches(8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.attend = Attend(8, 2, fused)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = x + self.attend(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(x.mean(1))


@network(FAMILY, *IMAGES)
def transformer_plain() -> nn.Module:
    return Transformer(False)


@network(FAMILY, *IMAGES)
def transformer_fused() -> nn.Module:
    return Transformer(True)


@network(FAMILY, *IMAGES)
class MultiheadModule(nn.Module):
    """torch's own attention module between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.deep = Patches(8), unit(3, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x)
        t = t + self.attend(t, t, t, need_weights=False)[0]
        return self.head(torch.cat([(t + self.mlp(t)).mean(1), pooled(self.deep(x))], 1))


@network(FAMILY, *IMAGES)
class EncoderLayerModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.patches = unit(3, 3), Patches(8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.patches(self.stem(x))).mean(1))


@network(FAMILY, *IMAGES)
class LinearAttention(nn.Module):
    """Keys meet values first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8, stride=2)
        self.q, self.k, self.v = (nn.Conv2d(8, 6, 1) for _ in range(3))
        self.out, self.head = nn.Conv2d(6, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = self.q(x).flatten(2), self.k(x).flatten(2), self.v(x).flatten(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        summary = torch.einsum("nct,ndt->ncd", k, v)
        scale = 1 / torch.einsum("nct,nc->nt", q, k.sum(-1))
        y = torch.einsum("nct,ncd,nt->ndt", q, summary, scale)
        return self.head(x + self.out(y.unflatten(2, x.shape[2:])))


@network(FAMILY, *IMAGES)
class AxialAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8, stride=2)
        self.rows, self.columns = Attend(8, 2, False), Attend(8, 2, True)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        r = self.rows(x.permute(0, 2, 3, 1).reshape(n * h, w, c)).view(n, h, w, c)
        s = self.columns(r.transpose(1, 2).reshape(n * w, h, c)).view(n, w, h, c)
        return self.head(s.permute(0, 3, 2, 1))


@network(FAMILY, image(size=16), image(size=32, batch=1))
class WindowAttention(nn.Module):
    """Swin-like windows of four, shifted by two, in NHWC."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.norm, self.attend = nn.LayerNorm(8), Attend(8, 2, False)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-2, -2), (1, 2))
        y = y.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        y = self.attend(y).view(n, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5)
        x = x + torch.roll(y.reshape(n, h, w, c), (2, 2), (1, 2))
        return self.head((x + self.mlp(x)).mean((1, 2)))


@network(FAMILY, *IMAGES)
class MobileViTLike(nn.Module):
    """Local convolution, attention over unfolded patches, fusion with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.local = unit(3, 8), nn.Conv2d(8, 8, 1)
        self.attend = Attend(8, 2, False)
        self.back, self.fuse = unit(8, 8, 1), unit(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.local(x)
        n, c, h, w = y.shape
        t = y.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 2, 4, 1)
        t = self.attend(t.reshape(n * 4, -1, c)).view(n, 2, 2, h // 2, w // 2, c)
        y = t.permute(0, 5, 3, 1, 4, 2).reshape(n, c, h, w)
        return self.head(self.fuse(torch.cat([x, self.back(y)], 1)))


@network(FAMILY, *IMAGES)
class CrossAttention(nn.Module):
    """Learnt queries look at an image, as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches(8)
        self.queries = nn.Parameter(torch.randn(5, 8))
        self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 12)
        self.mlp = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x)
        weights = (self.queries @ self.k(t).mT).softmax(-1)
        return self.mlp(weights @ self.v(t))


@network(FAMILY, *IMAGES)
class ClassToken(nn.Module):
    """A class token and positions that are parameters, at one size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches(8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.attend, self.head = Attend(8, 2, False), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x)
        t = torch.cat([self.token.expand(t.shape[0], -1, -1), t], 1)
        t = t + self.attend(t)
        return self.head((t + self.block(t))[:, 0])


@network(FAMILY, *IMAGES)
class GatedAxes(nn.Module):
    """Triplet attention: the channels change places with rows before a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = unit(3, 8), nn.Conv2d(2, 1, 3, 1, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = x.transpose(1, 2)
        both = torch.stack([y.mean(1), y.amax(1)], 1)
        return self.head((y * self.gate(both).sigmoid()).transpose(1, 2))
