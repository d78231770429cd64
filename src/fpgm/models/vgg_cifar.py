"""VGG-16 with batch norm for 32×32 images, in the form PFEC introduced and the paper prunes.

Thirteen 3×3 convolutions, then 512 → 512 → classes: a network without branches, where every filter
can be removed separately.
"""

from __future__ import annotations

from torch import Tensor, nn

from fpgm.errors import RequestError

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(classes: int = 10, width: float = 1.0) -> VGG:
    """Build a VGG-16 for CIFAR; `width` multiplies every layer's channels (0.25 for quick tests).

    >>> vgg16(width=0.25).classifier[-1]
    Linear(in_features=128, out_features=10, bias=True)
    """
    if width <= 0:
        raise RequestError(f"width={width} leaves no channels: use a positive multiplier.")
    return VGG(classes, width)


class VGG(nn.Module):
    """Five stages of convolutions, each ended by a 2×2 max pooling, then two linear layers."""

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for stage in STAGES:
            for full in stage:
                planes = max(1, round(full * width))
                layers += [
                    nn.Conv2d(inputs, planes, 3, padding=1, bias=False),
                    nn.BatchNorm2d(planes),
                    nn.ReLU(inplace=True),
                ]
                inputs = planes
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(inputs, inputs),
            nn.BatchNorm1d(inputs),
            nn.ReLU(inplace=True),
            nn.Linear(inputs, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, classes)."""
        x = self.features(x).flatten(1)  # (N, 512)
        logits: Tensor = self.classifier(x)
        return logits
