"""A small residual network for scikit-learn's 8×8 digits: 98 % after a dozen one-second epochs.

It has what makes pruning a residual network hard (streams, a projection shortcut, batch norm) at a
size where the whole story, training included, fits into a demonstration.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def digits(classes: int = 10, width: int = 32) -> DigitsNet:
    """A network for (N, 1, 8, 8) images; the second stage has twice `width` channels."""
    return DigitsNet(classes, width)


class Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut, projected by a 1×1 convolution where shapes differ."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != planes:
            self.shortcut.append(nn.Conv2d(inputs, planes, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        """Branch plus shortcut, then ReLU."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class DigitsNet(nn.Module):
    """Stem, two stages of two blocks, average pooling, one linear layer."""

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.stage1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.stage2 = nn.Sequential(
            Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1)
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 1, 8, 8) to logits (N, classes)."""
        x = self.stage2(self.stage1(self.stem(x)))  # (N, 2 width, 4, 4)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)  # (N, 2 width)
        logits: Tensor = self.head(x)
        return logits
