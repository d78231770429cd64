"""Networks to recover, data for them, and the error of the recovered model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fpgm


def stir(model: nn.Module) -> nn.Module:
    """Give batch norms random scales, shifts and statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.bias, -0.3, 0.3)
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def chain(*, norm: bool, activation: bool = True) -> nn.Sequential:
    layers = [
        nn.Conv2d(3, 8, 3, padding=1, bias=not norm),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU() if activation else nn.Identity(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    ]
    return nn.Sequential(*layers)


def batches(*shape: int, count: int = 8) -> list[Tensor]:
    return [torch.randn(16, *shape) for _ in range(count)]


@torch.no_grad()
def copy_unit(model: nn.Module, source: int, target: int) -> None:
    for module in (model[0], model[1]):
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.ndim:
                tensor[target] = tensor[source]


class Streams(nn.Module):
    """A residual network with a projection, with or without norms."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()

        def conv(a: int, b: int, k: int = 3, s: int = 1) -> nn.Sequential:
            item = nn.BatchNorm2d(b) if norm else nn.Identity()
            return nn.Sequential(nn.Conv2d(a, b, k, s, k // 2, bias=not norm), item)

        self.stem = conv(3, 16)
        self.one, self.two = conv(16, 16), conv(16, 16)
        self.three, self.four, self.short = conv(16, 24, 3, 2), conv(24, 24), conv(16, 24, 1, 2)
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (self.two(self.one(x).relu()) + x).relu()
        x = (self.four(self.three(x).relu()) + self.short(x)).relu()
        return self.head(x.mean((2, 3)))


class Mixed(nn.Module):
    """Depthwise, grouped, transposed, concatenated, shared, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.b = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.gate = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.Sigmoid())
        self.up = nn.ConvTranspose2d(16, 12, 4, 2, 1)
        self.twice = nn.Conv2d(12, 12, 3, padding=1)
        self.out = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.deep(self.a(x).relu()).relu()).relu()
        x = x * self.gate(x.mean((2, 3), keepdim=True))
        x = self.up(x).relu()
        y = self.twice(self.twice(x).relu()).relu()
        return self.out(torch.cat([x, y], 1))


NETS = {
    "chain": lambda: chain(norm=False),
    "norms": lambda: chain(norm=True),
    "streams": Streams,
    "streams without norms": lambda: Streams(norm=False),
    "mixed": Mixed,
}


def unseen(model: nn.Module, small: nn.Module, plan: fpgm.Plan, x: Tensor) -> tuple[float, float]:
    """Compute squared errors on new images: of the compact model, and of the recovered one."""
    with torch.no_grad():
        wanted = model(x)
        nets = (fpgm.compact(model, plan).eval(), small)
        before, after = (float((net(x) - wanted).square().mean()) for net in nets)
    return before, after
