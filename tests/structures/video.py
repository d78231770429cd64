"""Networks on video and volumes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import floats, network, unit

FAMILY = "video"
CLIPS = (floats(2, 3, 4, 8, 8), floats(1, 3, 8, 12, 12))


def unit3(before: int, after: int, kernel: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(before, after, kernel, 1, kernel // 2), nn.BatchNorm3d(after), nn.ReLU()
    )


@network(FAMILY, *CLIPS)
def volume_net() -> nn.Module:
    return nn.Sequential(
        unit3(3, 8), nn.MaxPool3d(2), unit3(8, 12), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
        nn.Linear(12, 5),
    )  # fmt: skip


@network(FAMILY, *CLIPS)
class SpaceThenTime(nn.Module):
    """(2+1)d: a spatial layer, then one along time, with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit3(3, 8, 1)
        self.space = nn.Conv3d(8, 12, (1, 3, 3), 1, (0, 1, 1))
        self.norm = nn.BatchNorm3d(12)
        self.time = nn.Conv3d(12, 8, (3, 1, 1), 1, (1, 0, 0))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.time(self.norm(self.space(x)).relu())
        return self.head(x.mean((2, 3, 4)))


class FrameNet(nn.Module):
    """Frames as a batch, shifted along time by a share of the channels."""

    def __init__(self, own_sizes: bool) -> None:
        super().__init__()
        self.own_sizes = own_sizes
        self.stem, self.mix = unit(3, 8), unit(8, 8)
        self.head = nn.Linear(8, 5)

    def shifted(self, x: Tensor, n: int) -> Tensor:
        t, c = x.shape[0] // n, x.shape[1]
        x = x.view(n, t, c, *x.shape[2:])
        fold = c // 4 if self.own_sizes else 2
        out = torch.zeros_like(x)
        out[:, :-1, :fold] = x[:, 1:, :fold]
        out[:, 1:, fold : 2 * fold] = x[:, :-1, fold : 2 * fold]
        out[:, :, 2 * fold :] = x[:, :, 2 * fold :]
        return out.flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[0], x.shape[2]
        y = self.stem(x.transpose(1, 2).flatten(0, 1))
        y = self.mix(self.shifted(y, n)).mean((2, 3))
        return self.head(y.view(n, t, -1).mean(1))


@network(FAMILY, *CLIPS)
def temporal_shift() -> nn.Module:
    return FrameNet(True)


@network(FAMILY, *CLIPS)
def temporal_shift_fixed() -> nn.Module:
    return FrameNet(False)


@network(FAMILY, *CLIPS)
class TemporalShiftByCat(nn.Module):
    """The shift by split, roll and concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = unit3(3, 12), unit3(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.stem(x).chunk(3, 1)
        y = torch.cat([a.roll(1, 2), b.roll(-1, 2), c], 1)
        return self.head(self.mix(y).mean((2, 3, 4)))


@network(FAMILY, *CLIPS)
class SlowFast(nn.Module):
    """Two rates, joined by a lateral layer."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast = unit3(3, 8), unit3(3, 4)
        self.lateral = nn.Conv3d(4, 6, (3, 1, 1), (2, 1, 1), (1, 0, 0))
        self.slow2, self.fast2 = unit3(14, 8), unit3(4, 4)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        slow, fast = self.slow(x[:, :, ::2]), self.fast(x)
        slow = self.slow2(torch.cat([slow, self.lateral(fast)], 1))
        parts = [slow.mean((2, 3, 4)), self.fast2(fast).mean((2, 3, 4))]
        return self.head(torch.cat(parts, 1))


@network(FAMILY, *CLIPS)
class Volumes3DUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit3(3, 6), unit3(6, 8)
        self.up = nn.ConvTranspose3d(8, 6, 2, 2)
        self.c, self.head = unit3(12, 6), nn.Conv3d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool3d(a, 2))
        return self.head(self.c(torch.cat([a, self.up(b)], 1)))


@network(FAMILY, *CLIPS)
class FrameDifferences(nn.Module):
    """Differences of neighbouring frames' features gate them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = unit3(3, 8), nn.Conv3d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        moves = F.pad(x[:, :, 1:] - x[:, :, :-1], (0, 0, 0, 0, 0, 1))
        return self.head((x * self.gate(moves).sigmoid()).amax((2, 3, 4)))


@network(FAMILY, *CLIPS)
class ChannelSeparated(nn.Module):
    """Depthwise 3-d layers between pointwise ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            unit3(3, 8, 1), nn.Conv3d(8, 8, 3, 1, 1, groups=8), unit3(8, 12, 1),
            nn.Conv3d(12, 12, 3, 1, 1, groups=12), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3, 4)))


@network(FAMILY, *CLIPS)
class ConvolutionalRecurrence(nn.Module):
    """A ConvLSTM whose four gates come from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 6
        self.gates = nn.Conv2d(3 + 6, 4 * 6, 3, 1, 1)
        self.mix, self.head = unit(6, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, t, h, w = x.shape
        state = x.new_zeros(n, self.hidden, h, w)
        memory = torch.zeros_like(state)
        for i in range(t):
            parts = self.gates(torch.cat([x[:, :, i], state], 1)).chunk(4, 1)
            keep, write, out = (p.sigmoid() for p in parts[:3])
            memory = keep * memory + write * parts[3].tanh()
            state = out * memory.tanh()
        return self.head(self.mix(state))
