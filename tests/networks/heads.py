"""Heads: from the last image to outputs of every kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .describe import ACTIVATIONS, head
from .parts import TO_AVG, TO_MAX, Shape, activation, conv, unit

CLASSES = 5


@dataclass
class Result:
    """An output that is neither tensor, tuple nor dict."""

    logits: Tensor
    map: Tensor


@head("pool_linear", how=("avg", "mean", "max"))
class PoolLinear(nn.Module):
    """Global pooling and a classifier."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__()
        dims = len(shape) - 1
        self.pool = {"avg": TO_AVG, "max": TO_MAX}[how][dims](1) if how != "mean" else None
        self.classifier = nn.Linear(shape[0], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).mean(2) if self.pool is None else self.pool(x).flatten(1)
        return self.classifier(x)


@head("flatten_linear", how=("flatten", "view", "module"))
class FlattenLinear(nn.Module):
    """A classifier that sees every pixel of every channel."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__()
        self.flatten = nn.Flatten() if how == "module" else None
        self.views = how == "view"
        self.classifier = nn.Linear(math.prod(shape), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.flatten is not None:
            return self.classifier(self.flatten(x))
        if self.views:
            return self.classifier(x.contiguous().view(x.shape[0], -1))
        return self.classifier(torch.flatten(x, 1))


@head("pool_flatten")
class PoolFlatten(nn.Module):
    """Pooling to 2 pixels a side, then a classifier over all of them, as VGG has."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dims = len(shape) - 1
        self.pool = TO_AVG[dims](2)
        self.classifier = nn.Linear(shape[0] * 2**dims, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(x).flatten(1))


@head("mlp_head", private=True, hidden=(12, 8, 16), act=ACTIVATIONS)
class MLPHead(nn.Module):
    """A classifier with hidden units."""

    def __init__(self, shape: Shape, hidden: int, act: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape[0], hidden),
            activation(act, hidden),
            nn.Dropout(0.2),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(2).mean(2))


@head("map", resize=(False, True))
class Map(nn.Module):
    """A class for every pixel, perhaps of a larger image."""

    def __init__(self, shape: Shape, resize: bool) -> None:
        super().__init__()
        self.classifier = conv(shape, shape[0], CLASSES, 1)
        self.resize = resize

    def forward(self, x: Tensor) -> Tensor:
        y = self.classifier(x)
        return F.interpolate(y, scale_factor=2.0) if self.resize else y


@head("several", kind=("tuple", "dict", "dataclass", "nested"))
class Several(nn.Module):
    """Two outputs, in any container."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.features = unit(shape, shape[0], 8)
        self.classifier = nn.Linear(8, CLASSES)
        self.map = conv(shape, 8, 3, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        logits, image = self.classifier(y.flatten(2).mean(2)), self.map(y)
        if self.kind == "dict":
            return {"logits": logits, "map": image}
        if self.kind == "dataclass":
            return Result(logits, image)
        return (logits, image) if self.kind == "tuple" else [{"logits": logits}, (image,)]


@head("auxiliary", hidden=(8, 6, 12))
class Auxiliary(nn.Module):
    """A classifier, and in training a second one with layers of its own."""

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(shape[0], CLASSES)
        self.extra = unit(shape, shape[0], hidden)
        self.extra_classifier = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Any:
        logits = self.classifier(x.flatten(2).mean(2))
        if not self.training:
            return logits
        return logits, self.extra_classifier(self.extra(x).flatten(2).mean(2))


@head("features")
class Features(nn.Module):
    """The last block's channels as they are, which therefore all stay."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x
