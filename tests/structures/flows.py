"""Experts, flows and control that depends on data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import floats, image, integers, network, pooled, together, unit

IMAGES = (image(), image(size=20, batch=3))
TOKENS = (integers(11, 3, 9), integers(11, 2, 14))
EXPERTS, FLOWS, CONTROL = "experts", "flows", "control flow"


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.GELU(), nn.Linear(hidden, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@network(EXPERTS, *IMAGES)
class SoftExperts(nn.Module):
    """All experts, weighted; they differ in width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.route = unit(3, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(Expert(h) for h in (8, 12, 16))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = pooled(self.stem(x))
        weights = self.route(f).softmax(1)
        created = torch.stack([e(f) for e in self.experts], 1)
        return self.head((weights[..., None] * created).sum(1))


@network(EXPERTS, image(batch=6), image(batch=9))
class TopExperts(nn.Module):
    """Only the best expert of each sample runs, with index_add for the results."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.route = unit(3, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(Expert(12) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = pooled(self.stem(x))
        best = self.route(f).argmax(1)
        out = torch.zeros_like(f)
        for i, expert in enumerate(self.experts):
            chosen = (best == i).nonzero().squeeze(1)
            out = out.index_add(0, chosen, expert(f[chosen]))
        return self.head(f + out)


@network(EXPERTS, *IMAGES)
class ExpertsAsOneTensor(nn.Module):
    """All experts' weights in one parameter, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.route = unit(3, 8), nn.Linear(8, 3)
        self.up = nn.Parameter(torch.randn(3, 8, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(3, 12, 8) * 0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = pooled(self.stem(x))
        h = torch.einsum("nc,ech->neh", f, self.up).relu()
        y = torch.einsum("neh,ehc->nec", h, self.down)
        return self.head((self.route(f).softmax(1)[..., None] * y).sum(1))


class Coupling(nn.Module):
    """Half of the channels scale and shift the other half; both stay."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(6, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 12, 3, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([b * scale.exp() + shift, a], 1), scale.flatten(1).sum(1)


@network(FLOWS, *IMAGES)
class NormalisingFlow(nn.Module):
    """Glow: squeeze, invertible 1 x 1, coupling; the log-determinant is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(12, 12))[0])
        self.layers = nn.ModuleList(Coupling() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.pixel_unshuffle(x, 2)
        x = F.conv2d(x, self.weight[:, :, None, None])
        total = self.weight.slogdet()[1] * x.shape[2] * x.shape[3]
        for layer in self.layers:
            x, change = layer(x)
            total = total + change
        return x, total


@network(FLOWS, floats(4, 6), floats(7, 6))
class CouplingOnVectors(nn.Module):
    """RealNVP with fixed masks."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12)) for _ in range(2)
        )
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        for i, net in enumerate(self.nets):
            mask = self.mask if i % 2 == 0 else 1 - self.mask
            scale, shift = net(x * mask).chunk(2, 1)
            x = x * mask + (1 - mask) * (x * scale.tanh().exp() + shift)
        return x


@network(FLOWS, *IMAGES)
class Reversible(nn.Module):
    """RevNet: two streams that change each other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 16)
        self.f, self.g, self.head = unit(8, 8), unit(8, 8), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x).chunk(2, 1)
        a = a + self.f(b)
        b = b + self.g(a)
        return self.head(torch.cat([a, b], 1))


@network(FLOWS, *IMAGES)
class NeuralODE(nn.Module):
    """Runge-Kutta steps of one small network, with time as a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = unit(3, 6), nn.Conv2d(7, 10, 3, 1, 1), nn.Conv2d(10, 6, 3, 1, 1)
        self.head = nn.Conv2d(6, 4, 1)

    def slope(self, t: float, x: Tensor) -> Tensor:
        time = torch.full_like(x[:, :1], t)
        return self.b(self.a(torch.cat([x, time], 1)).tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(2):
            middle = x + 0.25 * self.slope(i / 2, x)
            x = x + 0.5 * self.slope(i / 2 + 0.25, middle)
        return self.head(x)


@network(FLOWS, *IMAGES)
class DeepEquilibrium(nn.Module):
    """A fixed point, found by iterating under no_grad, then one step with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.f, self.head = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(3):
                z = (0.3 * self.f(z) + x).tanh()
        return self.head((0.3 * self.f(z) + x).tanh())


@network(CONTROL, *IMAGES)
class EarlyExit(nn.Module):
    """Stops when sure; a list of all exits in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([unit(3, 8), unit(8, 8), unit(8, 12)])
        self.exits = nn.ModuleList(nn.Linear(c, 4) for c in (8, 8, 12))

    def forward(self, x: Tensor) -> Any:
        result = []
        for stage, out in zip(self.stages, self.exits, strict=True):
            x = stage(x)
            result.append(out(pooled(x)))
            if not self.training and float(result[-1].softmax(1).amax(1).min()) > 0.999:
                break
        return result if self.training else result[-1]


def bright() -> Tensor:
    return torch.randn(2, 3, 16, 16) + 1


def dark() -> Tensor:
    return torch.randn(2, 3, 20, 20) - 1


@network(CONTROL, bright, dark, several=True)
class BranchOnInput(nn.Module):
    """Which branch runs depends on the input; the examples take both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = unit(3, 8), unit(8, 8), unit(8, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.a if float(x.mean()) > 0 else self.b
        return self.head(branch(self.stem(x)))


@network(CONTROL, *IMAGES)
class SkipOnFeatures(nn.Module):
    """A block is skipped when features are small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if bool(x.mean() > 1e9):
            return self.head(x)
        return self.head(x + self.a(x))


@network(CONTROL, *IMAGES)
class LoopUntilSmall(nn.Module):
    """The number of steps depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[0]
        x = self.stem(x)
        for _ in range(steps):
            x = 0.5 * (x + self.a(x))
        return self.head(x)


@network(CONTROL, together(image(), image(1)), image(), several=True)
class OptionalInput(nn.Module):
    """A second input that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side, self.head = unit(3, 8), unit(1, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        return self.head(x if extra is None else x + self.side(extra))


@network(CONTROL, *IMAGES)
class MultiScaleInput(nn.Module):
    """The model calls itself on a smaller image."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def once(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        small = self.once(F.avg_pool2d(x, 2))
        return self.once(x) + F.interpolate(small, size=x.shape[2:], mode="bilinear")
