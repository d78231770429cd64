"""Torch's fused attention passes modules by, and with them the adapters of a plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fpgm


class Encoder(nn.Module):
    """Adds what attention makes of a map to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.attend = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        tokens = y.flatten(2).transpose(1, 2)
        attended = self.attend(tokens).transpose(1, 2).view_as(y)
        out: Tensor = self.last(y + attended)
        return out


def test_a_compact_model_runs_by_the_fast_path_too() -> None:
    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(2, 1, 8, 8)
    plan = fpgm.plan(model, x, rate=0.4, align=1, residual="independent")
    small = fpgm.compact(model, plan)
    with torch.no_grad():
        assert small(x).shape == model(x).shape
    fpgm.verify(model, plan, x, compacted=small).check()
