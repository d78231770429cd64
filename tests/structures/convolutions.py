"""Grouped, depthwise and transposed layers, and sizes written in the code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, pooled, unit

GROUPED, FIXED = "grouped layers", "fixed sizes"
IMAGES = (image(), image(size=20, batch=3))


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


@network(GROUPED, *IMAGES)
def grouped() -> nn.Module:
    return chain(unit(3, 12), unit(12, 12, groups=3), unit(12, 8, 1), nn.Conv2d(8, 4, 1))


@network(GROUPED, *IMAGES)
def grouped_twice() -> nn.Module:
    return chain(unit(3, 12), unit(12, 12, groups=3), unit(12, 12, groups=2), nn.Conv2d(12, 4, 1))


@network(GROUPED, *IMAGES)
def depthwise_separable() -> nn.Module:
    return chain(
        unit(3, 8),
        unit(8, 8, groups=8),
        unit(8, 12, 1),
        unit(12, 12, groups=12),
        nn.Conv2d(12, 4, 1),
    )


@network(GROUPED, *IMAGES)
def depth_multiplier() -> nn.Module:
    return chain(unit(3, 6), unit(6, 18, groups=6), unit(18, 8, 1), nn.Conv2d(8, 4, 1))


@network(GROUPED, *IMAGES)
def grouped_to_fewer() -> nn.Module:
    """Several inputs and one output for each group."""
    return chain(unit(3, 12), unit(12, 4, groups=4), unit(4, 8), nn.Conv2d(8, 4, 1))


@network(GROUPED, *IMAGES)
def transposed_chain() -> nn.Module:
    return chain(
        unit(3, 8, stride=2), nn.ConvTranspose2d(8, 12, 4, 2, 1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.ConvTranspose2d(12, 4, 3, 1, 1),
    )  # fmt: skip


@network(GROUPED, *IMAGES)
def transposed_grouped() -> nn.Module:
    return chain(
        unit(3, 8), nn.ConvTranspose2d(8, 12, 2, 2, groups=2), nn.ReLU(), nn.Conv2d(12, 4, 1)
    )


@network(GROUPED, *IMAGES)
def transposed_depthwise() -> nn.Module:
    return chain(
        unit(3, 8), nn.ConvTranspose2d(8, 8, 2, 2, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )


@network(GROUPED, *IMAGES)
def transposed_multiplier() -> nn.Module:
    return chain(
        unit(3, 6), nn.ConvTranspose2d(6, 12, 2, 2, groups=6), nn.ReLU(), nn.Conv2d(12, 4, 1)
    )


@network(GROUPED, *IMAGES)
def lazy_modules() -> nn.Module:
    model = chain(
        nn.LazyConv2d(8, 3, 1, 1), nn.ReLU(), nn.LazyConv2d(8, 3, 1, 1), nn.LazyConv2d(4, 1)
    )
    model(torch.randn(1, 3, 8, 8))
    return model


@network(GROUPED, *IMAGES)
def odd_padding() -> nn.Module:
    """Circular, reflected and replicated padding, constant padding that is not zero."""
    return chain(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.ReflectionPad2d(1),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.ConstantPad2d(1, 0.7), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Conv2d(8, 4, 1, padding="same"),
    )  # fmt: skip


@network(GROUPED, *IMAGES)
def group_norms() -> nn.Module:
    return chain(
        nn.Conv2d(3, 12, 3, 1, 1), nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 8, 3, 1, 1),
        nn.GroupNorm(8, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 4, 1),
    )  # fmt: skip


@network(GROUPED, *IMAGES)
class MixedDepthwise(nn.Module):
    """MixConv: parts of the channels with kernels of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.sizes = unit(3, 12), (4, 8)
        self.a = nn.Conv2d(4, 4, 3, 1, 1, groups=4)
        self.b = nn.Conv2d(8, 8, 5, 1, 2, groups=8)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(self.stem(x), self.sizes, 1)
        return self.head(torch.cat([self.a(a), self.b(b)], 1).relu())


@network(GROUPED, *IMAGES)
class PartialConvolution(nn.Module):
    """FasterNet: a quarter of the channels is convolved, the rest passes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.part = unit(3, 12), nn.Conv2d(3, 3, 3, 1, 1)
        self.up, self.down, self.head = unit(12, 16, 1), nn.Conv2d(16, 12, 1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        a, b = x.split([3, 9], 1)
        return self.head(x + self.down(self.up(torch.cat([self.part(a), b], 1))))


@network(GROUPED, *IMAGES)
class OctaveConvolution(nn.Module):
    """High and low frequencies with exchanges between them."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = unit(3, 8), unit(3, 4)
        self.hh, self.hl = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 4, 3, 1, 1)
        self.ll, self.lh = nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 8, 3, 1, 1)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, low = self.high(x), self.low(F.avg_pool2d(x, 2))
        high = self.hh(h) + F.interpolate(self.lh(low), scale_factor=2.0)
        lower = self.ll(low) + self.hl(F.avg_pool2d(h, 2))
        return self.head(torch.cat([pooled(high.relu()), pooled(lower.relu())], 1))


@network(GROUPED, *IMAGES)
class CrossStagePartial(nn.Module):
    """CSP: two pointwise halves, one of them through blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = unit(3, 8), unit(8, 6, 1), unit(8, 6, 1)
        self.block, self.join = unit(6, 6), unit(12, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        a = self.a(x)
        return self.head(self.join(torch.cat([a + self.block(a), self.b(x)], 1)))


# Sizes written in the code.


@network(FIXED, image())
class FixedView(nn.Module):
    """A view with the width in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)).view(-1, 8, 256).mean(2))


@network(FIXED, *IMAGES)
class FixedSplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 16), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).split([8, 8], 1)
        return self.head(self.b(a * b))


@network(FIXED, *IMAGES)
class FixedSlice(nn.Module):
    """The first four channels are used, and the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 12), unit(5, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head(self.b(torch.cat([x[:, :4], x[:, -1:]], 1)))


@network(FIXED, *IMAGES)
class FixedZeros(nn.Module):
    """Zeros of a fixed width are added and joined."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(12, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = torch.cat(
            [x + torch.ones(1, 8, 1, 1, dtype=x.dtype), x.new_zeros(x.shape[0], 4, *x.shape[2:])], 1
        )
        return self.head(self.b(x))


@network(FIXED, *IMAGES)
class FixedLoopOverChannels(nn.Module):
    """Every channel by itself, in a loop over a fixed number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.each = unit(3, 6), nn.ModuleList(nn.Conv2d(1, 2, 3, 1, 1) for _ in range(6))
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        parts = [layer(x[:, i : i + 1]) for i, layer in enumerate(self.each)]
        return self.head(torch.cat(parts, 1).relu())


@network(FIXED, *IMAGES)
class PaddedShortcut(nn.Module):
    """Zeros before and behind, as CIFAR ResNets do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(8, 16, stride=2)
        self.c, self.head = nn.Conv2d(16, 16, 3, 1, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))
        return self.head(pooled((self.c(self.b(x)) + shortcut).relu()))


@network(FIXED, *IMAGES)
class ConcatenatedZeros(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(8, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        extra = torch.zeros(x.shape[0], 4, *x.shape[2:], dtype=x.dtype)
        return self.head(pooled(self.b(x) + torch.cat([x, extra], 1)))


@network(FIXED, *IMAGES)
class InputJoinedLate(nn.Module):
    """The image is joined to features, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(11, 8), nn.Conv2d(11, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.cat([x, self.a(x)], 1))
        return x + self.head(torch.cat([y, x], 1))


@network(FIXED, image(), image(batch=5))
class FlattenedAcrossScales(nn.Module):
    """Two maps flattened and joined before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 6, stride=4), unit(6, 8, stride=2)
        self.hidden, self.head = nn.Linear(6 * 16 + 8 * 4, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        both = torch.cat([a.flatten(1), self.b(a).flatten(1)], 1)
        return self.head(self.hidden(both).relu())


@network(FIXED, image())
class FlattenedChannelsLast(nn.Module):
    """Flattened in NHWC order, as models that came from Keras do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 6, stride=4), unit(6, 8)
        self.hidden, self.head = nn.Linear(8 * 16, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = self.b(self.a(x)).permute(0, 2, 3, 1).flatten(1)
        return self.head(self.hidden(f).relu())


@network(GROUPED, *IMAGES)
class Wavelets(nn.Module):
    """A fixed kernel, repeated for every channel, splits channels in four and joins them again."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2
        kernels = [torch.outer(a, b) for a in rows for b in rows]
        self.register_buffer("kernels", torch.stack(kernels)[:, None])
        self.first, self.second = unit(3, 8), unit(32, 16)
        self.third, self.head = nn.Conv2d(16, 12, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        count = x.shape[1]
        x = F.conv2d(x, self.kernels.repeat(count, 1, 1, 1), stride=2, groups=count)
        x = self.third(self.second(x))
        return self.head(F.conv_transpose2d(x, self.kernels.repeat(3, 1, 1, 1), None, 2, groups=3))
