"""A small residual network and how it is trained, for tests of pruning while training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

X = torch.randn(4, 3, 12, 12)


class Block(nn.Module):
    """A stem, a residual block with norms, and a head."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.activation = activation
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 24, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(24)
        self.outer = nn.Conv2d(24, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.bn1(self.stem(x)))
        x = x + self.outer(self.activation(self.bn2(self.inner(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def batches(count: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        x = torch.randn(16, 3, 12, 12, generator=generator, dtype=dtype)
        yield x, torch.randint(5, (16,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    model.train()
    losses = []
    dtype = next(model.parameters()).dtype
    for x, y in batches(count, dtype):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def zeroed_filters(conv: nn.Conv2d) -> list[int]:
    return torch.nonzero(~conv.weight.detach().flatten(1).any(1)).flatten().tolist()
