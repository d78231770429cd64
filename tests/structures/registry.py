"""The table of networks, and how their inputs are drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Draw = Callable[[], Any]
Made = TypeVar("Made", bound=Callable[[], nn.Module])


@dataclass(frozen=True)
class Network:
    """One network: how it is built and called."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    draw: Draw
    draw_others: tuple[Draw, ...] = ()
    several: bool = False
    """Whether one example is not enough to see all of its branches."""

    def build(self) -> nn.Module:
        """Build the model, the same one every time, in eval mode."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # older interfaces are networks too
            torch.manual_seed(7)
            model = self.make()
            _randomize_norms_(model)
        return model.eval()

    def example(self) -> Any:
        """Draw one example."""
        return _drawn(self.draw, 0)

    def examples(self) -> Any:
        """Draw what a user would plan with: an example, or a list of them."""
        if not self.several:
            return self.example()
        return [_drawn(draw, seed) for seed, draw in enumerate((self.draw, *self.draw_others))]

    def new_inputs(self) -> list[Any]:
        """Draw other inputs: new values, and other sizes where the network accepts them."""
        draws = [self.draw, *self.draw_others]
        return [_drawn(draw, seed) for seed, draw in enumerate(draws, 100)]


NETWORKS: dict[str, Network] = {}


def network(
    family: str, draw: Draw, *others: Draw, several: bool = False
) -> Callable[[Made], Made]:
    """Register a class or function that builds a network, under its own name."""

    def add(make: Made) -> Made:
        name = "".join(part[:1].upper() + part[1:] for part in make.__name__.split("_"))
        if name in NETWORKS:
            raise ValueError(f"There are two networks called {name}.")
        NETWORKS[name] = Network(name, family, make, draw, others, several)
        return make

    return add


def floats(*shape: int) -> Draw:
    """Draw a tensor of normal numbers."""
    return lambda: torch.randn(*shape)


def image(channels: int = 3, size: int = 16, batch: int = 2, width: int | None = None) -> Draw:
    """Draw a batch of images."""
    return floats(batch, channels, size, width or size)


def signal(channels: int = 1, length: int = 64, batch: int = 2) -> Draw:
    """Draw a batch of one-dimensional signals."""
    return floats(batch, channels, length)


def integers(high: int, *shape: int) -> Draw:
    """Draw a tensor of integers, such as tokens."""
    return lambda: torch.randint(0, high, shape)


def together(*draws: Draw) -> Draw:
    """Draw a tuple of arguments."""
    return lambda: tuple(draw() for draw in draws)


def named(**draws: Draw) -> Draw:
    """Draw a dict of keyword arguments."""
    return lambda: {name: draw() for name, draw in draws.items()}


def unit(before: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    """Convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def pooled(x: Tensor) -> Tensor:
    """Average over space."""
    return x.flatten(2).mean(2)


def _drawn(draw: Draw, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return draw()


@torch.no_grad()
def _randomize_norms_(model: nn.Module) -> None:
    """Give batch norms statistics of their own: none is the identity."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for name, low, high in (
                ("weight", 0.5, 1.5),
                ("bias", -0.5, 0.5),
                ("running_mean", -0.5, 0.5),
                ("running_var", 0.5, 2.0),
            ):
                tensor = getattr(module, name, None)
                if tensor is not None:
                    tensor.uniform_(low, high)
