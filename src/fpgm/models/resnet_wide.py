"""A wide residual network for CIFAR-10: as wide as networks in practice, but quick to train.

Three stages of 64, 192 and 240 channels. Each begins with a convolution and a max pooling, so that
its residual block works on a quarter of the positions.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (64, 192, 240)
"""Channels of the three stages."""


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions, added to the block's input."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x: Tensor) -> Tensor:
        """Branch plus input, then ReLU."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


class Stage(nn.Module):
    """Convolution, max pooling, batch norm and ReLU, then a residual block."""

    def __init__(self, inputs: int, planes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, planes, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(planes)
        self.block = ResidualBlock(planes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, planes, H / 2, W / 2)."""
        out: Tensor = self.block(F.relu(self.bn(F.max_pool2d(self.conv(x), 2))))
        return out


class WideResNet(nn.Module):
    """Stem, three stages, global max pooling, one linear layer: 11 weighted layers."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        inputs = (WIDTHS[0], *WIDTHS)
        self.stages = nn.Sequential(*map(Stage, inputs, WIDTHS))
        self.linear = nn.Linear(WIDTHS[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, 32, 32) to logits (N, classes)."""
        x = F.relu(self.bn(self.conv(x)))  # (N, 64, 32, 32)
        x = self.stages(x)  # (N, 240, 4, 4)
        logits: Tensor = self.linear(F.adaptive_max_pool2d(x, 1).flatten(1))
        return logits


def wide_resnet(classes: int = 10) -> WideResNet:
    """Build the wide ResNet for images of 32×32.

    >>> sum(p.numel() for p in wide_resnet().parameters())
    2343498
    """
    return WideResNet(classes)
