"""State in plain attributes, and values that leave torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .registry import image, network, unit

FAMILY = "state"
IMAGES = (image(), image(size=20, batch=3))


@network(FAMILY, *IMAGES)
class KeepsFeatures(nn.Module):
    """The last features stay in an attribute that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x)
        return self.head(self.b(self.last))


@network(FAMILY, image())
class ReadsFeaturesOfLastCall(nn.Module):
    """A feature map of the first call is added in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.kept is not None and self.kept.shape == x.shape:
            x = x + self.kept.to(x)
        else:
            self.kept = torch.ones_like(x)
        return self.head(self.b(x))


@network(FAMILY, *IMAGES)
class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.b(self.a(x)))


@network(FAMILY, *IMAGES)
class LazyGrid(nn.Module):
    """Coordinates, built when first needed and kept by size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(10, 8), nn.Conv2d(8, 4, 1)
        self.grids: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        f = self.a(x)
        size = tuple(f.shape[2:])
        if size not in self.grids:
            ys = torch.linspace(-1, 1, size[0])[:, None].expand(size)
            xs = torch.linspace(-1, 1, size[1])[None].expand(size)
            self.grids[size] = torch.stack([ys, xs])
        grid = self.grids[size].to(f).expand(f.shape[0], -1, -1, -1)
        return self.head(self.b(torch.cat([f, grid], 1)))


@network(FAMILY, *IMAGES)
class LazyChannelMask(nn.Module):
    """A mask of the features' own width, built when first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.mask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.mask is None or self.mask.shape[1] != x.shape[1]:
            self.mask = torch.full((1, x.shape[1], 1, 1), 0.5)
        return self.head(self.b(x * self.mask.to(x)))


@network(FAMILY, *IMAGES)
class MovingAverage(nn.Module):
    """A buffer of features' means, updated while training and used in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.register_buffer("mean", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 2, 3)), 0.1)
        return self.head(self.b(x - self.mean[:, None, None]))


@network(FAMILY, *IMAGES)
class LogsStatistics(nn.Module):
    """Numbers leave through item and tolist into a log."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.log: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.log["mean"] = x.mean().item()
        self.log["channels"] = x.mean((0, 2, 3)).tolist()
        return self.head(self.b(x))


@network(FAMILY, image())
class UsesItem(nn.Module):
    """A number that leaves the tensors scales what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head(self.b(x)) * (1 + x.abs().sum().item() / x.numel())


@network(FAMILY, image())
class UsesNumpy(nn.Module):
    """Channel means go through NumPy and come back as gates."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        means = x.detach().mean((2, 3)).numpy()
        gates = torch.from_numpy(means / (1 + abs(means)))
        return self.head(self.b(x * gates[:, :, None, None]))


@network(FAMILY, image())
class UsesToList(nn.Module):
    """The order of channel means decides a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        means = x.mean((0, 2, 3)).tolist()
        return self.head(self.b(x * (1 + max(means))))


@network(FAMILY, image())
class KeyValueCache(nn.Module):
    """A cache in a dict that is emptied at the start of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(16, 4, 1)
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.cache.clear()
        self.cache["a"] = self.a(x)
        self.cache["b"] = self.b(self.cache["a"])
        return self.head(torch.cat(list(self.cache.values()), 1))
