"""Splitting, shuffling and otherwise moving channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .describe import ACTIVATIONS, ANY, LARGEST, WIDTHS, block
from .parts import Shape, activation, conv, fit, halving, unit


@block(
    "split",
    ANY,
    how=(
        "chunk",
        "split_derived",
        "split_attr",
        "sizes_attr",
        "slice_derived",
        "slice_const",
        "narrow",
        "stride",
        "tensor_split",
    ),
    join=("cat", "swap", "add", "convs"),
    act=ACTIVATIONS,
)
class Split(nn.Module):
    """Two parts of the channels, by every spelling, of which one or both go through layers."""

    def __init__(self, shape: Shape, how: str, join: str, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, 4 if how == "slice_const" else 2)
        self.how, self.join = how, join
        first = channels // 2
        if how == "split_attr":
            self.width = first
        elif how == "sizes_attr":
            first = max(1, channels // 4)
            self.sizes = (first, channels - first)
        elif how == "slice_const":
            first = 3
        if join == "add" and 2 * first != channels:
            self.join = "convs"
        out = 8 if self.join == "convs" else first
        self.one = nn.Sequential(conv(shape, first, out), activation(act, out))
        if self.join == "convs":
            self.two = conv(shape, channels - first, out)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.parts(self.fit(x))
        if self.join == "cat":
            return torch.cat([self.one(a), b], 1)
        if self.join == "swap":
            return torch.cat([b, self.one(a)], 1)
        return self.one(a) + (b if self.join == "add" else self.two(b))

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """Both parts of the channels."""
        half = x.shape[1] // 2
        if self.how == "chunk":
            return x.chunk(2, 1)
        if self.how == "tensor_split":
            return x.tensor_split(2, 1)
        if self.how == "split_derived":
            return x.split(half, 1)
        if self.how == "split_attr":
            return x.split(self.width, 1)
        if self.how == "sizes_attr":
            return torch.split(x, self.sizes, 1)
        if self.how == "slice_derived":
            return x[:, :half], x[:, half:]
        if self.how == "slice_const":
            return x[:, :3], x[:, 3:]
        if self.how == "stride":
            return x[:, 0::2], x[:, 1::2]
        return x.narrow(1, 0, half), x.narrow(1, half, x.shape[1] - half)


@block("glu", ANY, private=True, how=("chunk", "function", "split"), hidden=WIDTHS, out=WIDTHS)
class Gated(nn.Module):
    """Gated linear unit: one half of the channels opens or shuts the other."""

    def __init__(self, shape: Shape, how: str, hidden: int, out: int) -> None:
        super().__init__()
        self.how = how
        self.widen = conv(shape, shape[0], 2 * hidden)
        self.narrow = conv(shape, hidden, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(x)
        if self.how == "function":
            return self.narrow(F.glu(y, 1))
        a, b = y.chunk(2, 1) if self.how == "chunk" else y.split(y.shape[1] // 2, 1)
        return self.narrow(a * torch.sigmoid(b))


def _shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, *space = x.shape
    x = x.view(batch, groups, channels // groups, *space).transpose(1, 2)
    return x.reshape(batch, channels, *space)


@block("shuffle", how=("view", "module"), groups=(2, 4), grouped=(False, True))
class Shuffle(nn.Module):
    """Channel shuffle, alone or between grouped convolutions as in ShuffleNet."""

    def __init__(self, shape: Shape, how: str, groups: int, grouped: bool) -> None:
        super().__init__()
        self.fit, channels = fit(shape, groups)
        self.before = unit(shape, channels, channels, 1, 1, groups) if grouped else None
        self.shuffle = nn.ChannelShuffle(groups) if how == "module" else None
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        x = self.fit(x)
        if self.before is not None:
            x = self.before(x)
        return _shuffle(x, self.groups) if self.shuffle is None else self.shuffle(x)


@block("shufflenet", down=(False, True), act=ACTIVATIONS)
class ShuffleNet(nn.Module):
    """ShuffleNetV2's block: split, branch, concat, shuffle."""

    def __init__(self, shape: Shape, down: bool, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, 2)
        self.down = down and channels <= 24
        c = channels if self.down else channels // 2
        stride = halving(shape) if self.down else 1
        if self.down:
            self.side = nn.Sequential(
                unit(shape, c, c, 3, stride, c, "none"), unit(shape, c, c, 1, act=act)
            )
        self.branch = nn.Sequential(
            unit(shape, c, c, 1, act=act),
            unit(shape, c, c, 3, stride, c, "none"),
            unit(shape, c, c, 1, act=act),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.fit(x)
        if self.down:
            return _shuffle(torch.cat([self.side(x), self.branch(x)], 1), 2)
        a, b = x.chunk(2, 1)
        return _shuffle(torch.cat([a, self.branch(b)], 1), 2)


@block("pixel_shuffle", private=True, hidden=(4, 3, 6), how=("module", "function"), out=WIDTHS)
class PixelShuffle(nn.Module):
    """Channels become pixels: four of them are one unit for the next layer."""

    def __init__(self, shape: Shape, hidden: int, how: str, out: int) -> None:
        super().__init__()
        self.widen = unit(shape, shape[0], 4 * hidden)
        self.shuffle = nn.PixelShuffle(2) if how == "module" else None
        self.narrow = conv(shape, hidden, out, stride=1 if max(shape[1:]) * 2 <= LARGEST else 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(x)
        y = F.pixel_shuffle(y, 2) if self.shuffle is None else self.shuffle(y)
        return self.narrow(y)


@block("pixel_unshuffle", how=("module", "function"), out=WIDTHS)
class PixelUnshuffle(nn.Module):
    """Pixels become channels: one unit is four channels for the next layer."""

    def __init__(self, shape: Shape, how: str, out: int) -> None:
        super().__init__()
        self.factor = halving(shape) if all(size % 2 == 0 for size in shape[1:]) else 1
        self.shuffle = nn.PixelUnshuffle(self.factor) if how == "module" else None
        self.narrow = unit(shape, shape[0] * self.factor**2, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pixel_unshuffle(x, self.factor) if self.shuffle is None else self.shuffle(x)
        return self.narrow(y)


@block("flip", ANY)
class Flip(nn.Module):
    """The channels in reverse."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


@block("roll", ANY, by=(1, 3))
class Roll(nn.Module):
    """The channels moved round."""

    def __init__(self, shape: Shape, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(self.by, 1)


@block("slice_write")
class SliceWrite(nn.Module):
    """Halves swapped by writing into slices of an empty tensor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fit, _ = fit(shape, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fit(x)
        half = x.shape[1] // 2
        y = torch.zeros_like(x)
        y[:, :half] = x[:, half:]
        y[:, half:] = x[:, :half]
        return y


@block("fold_batch", hidden=(4, 6))
class FoldBatch(nn.Module):
    """Halves of the channels as further images of the batch, so one weight reads both."""

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        self.fit, channels = fit(shape, 2)
        self.conv = conv(shape, channels // 2, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fit(x)
        batch, channels, *space = x.shape
        y = F.relu(self.conv(x.reshape(batch * 2, channels // 2, *space)))
        return y.reshape(batch, 2 * y.shape[1], *space)
