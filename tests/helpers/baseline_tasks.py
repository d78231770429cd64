"""Small networks and labelled noise that methods are tried on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fpgm.paper.baselines.registry import SgdSchedule, Task


def data(count: int = 4, classes: int = 6) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 3, 6, 6, generator=random),
         torch.randint(0, classes, (16,), generator=random))
        for _ in range(count)
    ]  # fmt: skip


def task_of(model: nn.Module, macs: float = 0.4, **options: Any) -> Task:
    batches = data()
    options = {"before_pruning": SgdSchedule(4), "images": 32, **options}
    return Task(model, batches[0][0][:1], macs, loader=batches, **options)


class Two(nn.Module):
    """A convolution with eight filters and one that reads them, with a norm between."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.b = nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu()).mean((2, 3))
