"""Channels that are stacked, shuffled, sliced and put together again: plans right by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers.movement import MovementNet, check
from torch import Tensor, nn

import fpgm

Middle = Callable[[Tensor, Tensor], Tensor]


class TwoBranches(nn.Module):
    """Two convolutions of eight filters, something in between, a convolution and a head."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.middle = middle
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        width = middle(torch.zeros(1, 8, 6, 6), torch.zeros(1, 8, 6, 6)).shape[1]
        self.read, self.head = nn.Conv2d(width, 8, 3, padding=1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.a(x).tanh(), self.b(x).tanh())
        out: Tensor = self.head(self.read(x).tanh())
        return out


def to_pixels(x: Tensor) -> Tensor:
    """A pixel shuffle by hand."""
    b, c, h, w = x.shape
    return x.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)


def swapped(x: Tensor) -> Tensor:
    """Pairs of channels taken apart: first all first ones, then all second ones."""
    b, c, h, w = x.shape
    return x.view(b, c // 2, 2, h, w).transpose(1, 2).reshape(b, c, h, w)


def last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


INTERLEAVED: dict[str, Middle] = {
    "stack behind the channels, flatten": lambda a, b: torch.stack([a, b], 2).flatten(1, 2),
    "stack behind the channels, reshape": lambda a, b: torch.stack([a, b], 2).reshape(
        len(a), -1, *a.shape[2:]
    ),
    "(y, x) offsets": lambda a, b: torch.cat(
        [torch.stack(torch.chunk(t, 2, 1), 2).flatten(1, 2) for t in (a, b)], 1
    ),
    "channels last": lambda a, b: torch.stack([last(a), last(b)], 4).flatten(3).movedim(3, 1),
    "concatenated dims": lambda a, b: torch.cat([a[:, :, None], b[:, :, None]], 2).flatten(1, 2),
    "three branches": lambda a, b: torch.stack([a, b, a * b], 2).flatten(1, 2),
    "more branches than channels": lambda a, b: torch.stack([a, b, a * b] * 3, 2).flatten(1, 2),
}
PAIRED: dict[str, Middle] = {
    "gated by steps": lambda a, b: a[:, ::2] * a[:, 1::2].sigmoid() + b.chunk(2, 1)[0],
    "repeated one by one": lambda a, b: (a + b).repeat_interleave(2, 1),
    "pairs taken apart": lambda a, b: swapped(a) + b,
    "unflatten, movedim": lambda a, b: a.unflatten(1, (-1, 2)).movedim(2, 1).flatten(1, 2) + b,
    "pixels by hand": lambda a, b: to_pixels(a) + to_pixels(b),
    "chunks in another order": lambda a, b: torch.cat([*a.chunk(4, 1)[::-1], b], 1),
    "flip": lambda a, b: a.flip(1) + b,
}
END_TO_END: dict[str, Middle] = {
    "stack before the channels, flatten": lambda a, b: torch.stack([a, b], 1).flatten(1, 2),
    "channels last": lambda a, b: torch.stack([last(a), last(b)], 3).flatten(3).movedim(3, 1),
    "stack before, unbind, cat": lambda a, b: torch.cat(torch.stack([a, b], 1).unbind(1), 1),
}


def kept(net: nn.Module, name: str) -> tuple[int, ...]:
    plan = fpgm.plan(net, torch.randn(2, 3, 6, 6), rate=0.5, align=1)
    return next(cut.keep for cut in plan.cuts if cut.tensor == f"{name}.weight")


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_branches_are_pruned_right(name: str, rate: float) -> None:
    assert check(TwoBranches(INTERLEAVED[name]), rate) == "right"


@pytest.mark.parametrize("name", [n for n in INTERLEAVED if n != "(y, x) offsets"])
def test_equal_positions_of_interleaved_branches_go_together(name: str) -> None:
    net = TwoBranches(INTERLEAVED[name])
    assert kept(net, "a") == kept(net, "b")
    assert len(kept(net, "a")) == 4


@pytest.mark.parametrize("name", END_TO_END)
def test_branches_end_to_end_only_keep_equally_many(name: str) -> None:
    net = TwoBranches(END_TO_END[name])
    assert check(net, 0.5) == "right"
    net.float()
    assert len(kept(net, "a")) == len(kept(net, "b")) == 4
    assert kept(net, "a") != kept(net, "b")


@pytest.mark.parametrize("name", PAIRED)
def test_channels_moved_within_a_tensor_are_pruned_right(name: str) -> None:
    net = TwoBranches(PAIRED[name])
    assert check(net, 0.5) == "right"
    net.float()
    assert len(kept(net, "a")) == 4


def test_a_window_counted_from_the_end_keeps_the_channels_it_shows() -> None:
    """The last four of `b` are not shown, but are what the window is counted from."""

    class Window(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
            self.c, self.head = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            both = torch.cat([self.a(x), self.b(x)], 1)
            head: Tensor = self.head(self.c(both).tanh()).mean((1, 2, 3), keepdim=True)
            return both[:, -13:-4] + head

    assert check(Window(), 0.5) == "right"


class ShuffleUnit(nn.Module):
    """Half of the channels pass, half go through a branch, and both are shuffled."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        half = width // 2
        self.how = how
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1),
            nn.BatchNorm2d(half),
            nn.Tanh(),
            nn.Conv2d(half, half, 3, padding=1, groups=half),
            nn.Conv2d(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        passed, branch = x.chunk(2, 1)
        x = torch.cat([passed, self.branch(branch)], 1)
        if self.how == "channel_shuffle":
            return torch.channel_shuffle(x, 2)
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2)
        return x.flatten(1, 2) if self.how == "flatten" else x.reshape(b, -1, h, w)


@pytest.mark.parametrize("how", ["channel_shuffle", "flatten", "reshape"])
@pytest.mark.parametrize("width", [2, 4, 6, 8, 16])
def test_halves_that_may_shrink_to_one_channel_are_shuffled_right(width: int, how: str) -> None:
    for units, rate in ((1, 0.5), (2, 0.3), (2, 0.7), (3, 0.9)):
        net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.Tanh(),
            *(ShuffleUnit(width, how) for _ in range(units)),
            nn.Conv2d(width, 4, 1),
        )
        assert check(net, rate) in ("right", "frozen")


class ShuffledInOneForward(nn.Module):
    """Shuffle units without a module around each, so that no gather can be put behind one."""

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        half = width // 2
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 4, 1)
        self.branches = nn.ModuleList(nn.Conv2d(half, half, 3, padding=1) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for branch in self.branches:
            passed, half = x.chunk(2, 1)
            b, c, h, w = x.shape
            x = torch.cat([passed, branch(half).tanh()], 1).view(b, 2, c // 2, h, w)
            x = x.transpose(1, 2).reshape(b, c, h, w)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(("width", "units"), [(4, 2), (4, 3), (8, 3), (16, 2)])
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
def test_shuffles_of_single_channels_in_one_forward(width: int, units: int, rate: float) -> None:
    torch.manual_seed(width * units)
    assert check(ShuffledInOneForward(width, units), rate) in ("right", "frozen")


MANY = [pytest.param(seed, marks=pytest.mark.sweep) for seed in range(100, 300, 4)]


@pytest.mark.parametrize("seed", [*range(0, 100, 4), *MANY])
def test_random_movements_between_convolutions_are_pruned_right(seed: int) -> None:
    for number in range(seed, seed + 4):
        net = MovementNet(number)
        results = check(net, (0.3, 0.5, 0.7, 0.9)[number % 4])
        assert results in ("right", "frozen"), (number, net.names)
