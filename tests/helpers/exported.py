"""A network with many kinds of norms, and exported files loaded in their runtimes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fpgm.exporters.onnx import OnnxModule


class Mixed(nn.Module):
    """Norms that can be folded, and norms that cannot: with two consumers, or before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.an = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.first, self.c = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.up, self.un = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.BatchNorm2d(4)
        self.line, self.ln = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.an(self.a(x)))
        b = self.b(x)
        x = self.bn(b) + b
        x = self.un(self.up(self.c(torch.relu(self.first(x)))))
        y: Tensor = self.ln(self.line(x.mean((2, 3))))
        return y


def loaded(file: Path, to: str) -> nn.Module:
    if to == "onnx":
        return OnnxModule(file.read_bytes())
    if to == "pt2":
        return torch.export.load(file).module()
    with pytest.warns(DeprecationWarning, match="torch.jit.load"):
        results: nn.Module = torch.jit.load(file)
    return results
