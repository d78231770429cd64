"""Channels that change places."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .registry import image, network, pooled, unit

FAMILY = "shuffles"
IMAGES = (image(), image(size=20, batch=3))


def shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class ShuffleUnitV2(nn.Module):
    """Half of the channels pass, half go through a branch, then both are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            unit(half, half, 1),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            unit(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return shuffle(torch.cat([a, self.branch(b)], 1), 2)


def shuffled_units(stem: int, count: int) -> nn.Module:
    return nn.Sequential(
        unit(3, stem),
        *(ShuffleUnitV2(stem) for _ in range(count)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(stem, 5),
    )


@network(FAMILY, *IMAGES)
def shuffle_v2_after_stem() -> nn.Module:
    return shuffled_units(8, 1)


@network(FAMILY, *IMAGES)
def shuffle_v2_narrow() -> nn.Module:
    """Halves of two channels: at a rate of 0.5 each keeps one."""
    return shuffled_units(4, 1)


@network(FAMILY, *IMAGES)
def shuffle_v2_twice() -> nn.Module:
    return shuffled_units(4, 2)


@network(FAMILY, *IMAGES)
def shuffle_v2_deep() -> nn.Module:
    return shuffled_units(12, 3)


@network(FAMILY, *IMAGES)
class ShuffleV2Down(nn.Module):
    """The unit with stride: both halves have a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8)
        self.a = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=8), unit(8, 8, 1))
        self.b = nn.Sequential(unit(8, 8, 1), nn.Conv2d(8, 8, 3, 2, 1, groups=8), unit(8, 8, 1))
        self.unit = ShuffleUnitV2(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = shuffle(torch.cat([self.a(x), self.b(x)], 1), 2)
        return self.head(pooled(self.unit(x)))


@network(FAMILY, *IMAGES)
class ShuffleV1(nn.Module):
    """Grouped pointwise convolutions with a shuffle between, in a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 12)
        self.reduce = unit(12, 6, 1, groups=3)
        self.depthwise = nn.Conv2d(6, 6, 3, 1, 1, groups=6)
        self.expand = nn.Conv2d(6, 12, 1, groups=3)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.expand(self.depthwise(shuffle(self.reduce(x), 3)))
        return self.head(pooled((x + y).relu()))


@network(FAMILY, *IMAGES)
class ChannelShuffleModule(nn.Module):
    """torch's own shuffle between two grouped layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            unit(3, 12), unit(12, 12, groups=2), nn.ChannelShuffle(2), unit(12, 12, groups=2)
        )
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@network(FAMILY, *IMAGES)
class FixedPermutation(nn.Module):
    """An index that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = unit(3, 8), unit(8, 8)
        self.register_buffer("order", torch.tensor([3, 1, 7, 5, 0, 2, 6, 4]))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.stem(x)[:, self.order]))


@network(FAMILY, *IMAGES)
class FlippedChannels(nn.Module):
    """Channels added to themselves in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = unit(3, 8), unit(8, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.mix(x + x.flip(1)))


@network(FAMILY, *IMAGES)
class RolledChannels(nn.Module):
    """Channels moved on by two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = unit(3, 8), unit(8, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(torch.roll(self.stem(x), 2, 1)))


@network(FAMILY, *IMAGES)
class ShuffleByEinsumAxes(nn.Module):
    """The shuffle by unflatten, movedim and flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = unit(3, 12), unit(12, 12, groups=3)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).unflatten(1, (3, -1)).movedim(1, 2).flatten(1, 2)
        return self.head(self.mix(y))


@network(FAMILY, *IMAGES)
class SpaceToDepth(nn.Module):
    """Pixels become channels, as in YOLO's focus layer, after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = unit(3, 6), unit(24, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        parts = [x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return self.head(self.mix(torch.cat(parts, 1)))


@network(FAMILY, *IMAGES)
class PixelUnshuffled(nn.Module):
    """torch's own way from pixels to channels and back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = unit(3, 6), unit(24, 16)
        self.down, self.up = nn.PixelUnshuffle(2), nn.PixelShuffle(2)
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.mix(self.down(self.stem(x)))))
