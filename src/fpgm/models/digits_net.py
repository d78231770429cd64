"""A small residual network for scikit-learn's 8×8 digits: 98 % after a dozen one-second epochs.

It has everything that makes pruning a residual network hard (streams, a projection shortcut, batch
norm), and is small enough to train in a demonstration.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fpgm.models.resnet_cifar import BasicBlock


def digits(classes: int = 10, width: int = 32) -> DigitsNet:
    """Build a network for (N, 1, 8, 8) images; the second stage has twice `width` channels."""
    return DigitsNet(classes, width)


class Residual(BasicBlock):
    """A basic block whose shortcut is a 1×1 convolution where shapes differ."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__(inputs, planes, stride)
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )


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
        """Map images (N, 1, 8, 8) to logits (N, classes)."""
        x = self.stage2(self.stage1(self.stem(x)))  # (N, 2 width, 4, 4)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)  # (N, 2 width)
        logits: Tensor = self.head(x)
        return logits
