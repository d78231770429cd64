"""The CIFAR ResNets of He et al.: three stages of 16, 32 and 64 channels, depth 6n + 2.

Shortcuts have no parameters (option A): where the shape changes they drop every second pixel and
pad the channels with zeros. Parameter names match the most widely used public weights, so those
load directly.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fpgm.errors import RequestError


def resnet(depth: int, classes: int = 10) -> ResNet:
    """Build a CIFAR ResNet with `depth` weighted layers: 20, 32, 44, 56, 110, 1202 or any 6n + 2.

    >>> sum(p.numel() for p in resnet(20).parameters())
    269722
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        lower = 6 * max(blocks, 1) + 2
        raise RequestError(
            f"A CIFAR ResNet has 6n + 2 layers, which {depth} is not: try {lower} or {lower + 6}."
        )
    return ResNet(blocks, classes)


class PadShortcut(nn.Module):
    """Halve the image by taking every second pixel, double the channels by padding with zeros."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.pad = planes // 4

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C + 2 pad, H / 2, W / 2); the original channels are in the middle."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"pad={self.pad}"


class BasicBlock(nn.Module):
    """Two 3×3 convolutions added to the stream they read from."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        changes = stride != 1 or inputs != planes
        self.shortcut = PadShortcut(planes) if changes else nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        """Branch plus shortcut, then ReLU."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, three stages of `blocks` blocks each, average pooling, one linear layer."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, 32, 32) to logits (N, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))  # (N, 16, 32, 32)
        x = self.layer1(x)  # (N, 16, 32, 32)
        x = self.layer2(x)  # (N, 32, 16, 16)
        x = self.layer3(x)  # (N, 64, 8, 8)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)  # (N, 64)
        logits: Tensor = self.linear(x)
        return logits


def _stage(inputs: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, planes, stride)
    return nn.Sequential(first, *(BasicBlock(planes, planes, 1) for _ in range(blocks - 1)))
