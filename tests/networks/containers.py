"""Heads whose outputs are in containers of every kind, of two scales, or integers."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .describe import head
from .parts import Shape, conv, unit

CLASSES = 5


class DictResult(dict):  # type: ignore[type-arg]
    """A dict of one's own."""


class ListResult(list):  # type: ignore[type-arg]
    """A list of one's own."""


class TupleResult(tuple):  # type: ignore[type-arg]
    """A tuple of one's own."""


class NamedResult(NamedTuple):
    """A tuple with names."""

    logits: Tensor
    map: Tensor


class SlotsResult:
    """An object without a dict."""

    __slots__ = ("logits", "map")

    def __init__(self, logits: Tensor, image: Tensor) -> None:
        self.logits, self.map = logits, image


@dataclass(slots=True)
class SlotsDataclass:
    """A dataclass without a dict."""

    logits: Tensor
    map: Tensor


PACKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict_subclass": lambda a, b: DictResult(logits=a, map=b),
    "list_subclass": lambda a, b: ListResult([a, b]),
    "tuple_subclass": lambda a, b: TupleResult((a, b)),
    "named_tuple": NamedResult,
    "slots": SlotsResult,
    "slots_dataclass": SlotsDataclass,
    "proxy": lambda a, b: types.MappingProxyType({"logits": a, "map": b}),
    "deep": lambda a, b: {"x": [DictResult(a=a), ("text", None, ListResult([b]))]},
}


@head("containers", kind=tuple(PACKS))
class Containers(nn.Module):
    """Two outputs, in containers that are not torch's own."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.features = unit(shape, shape[0], 8)
        self.classifier, self.map = nn.Linear(8, CLASSES), conv(shape, 8, 3, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        return PACKS[self.kind](self.classifier(y.flatten(2).mean(2)), self.map(y))


@head("two_scales", scale=(1280.0, 1e-4, 1e6))
class TwoScales(nn.Module):
    """Boxes and scores in one tensor, as detectors have."""

    def __init__(self, shape: Shape, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.boxes = nn.Sequential(unit(shape, shape[0], 8), conv(shape, 8, 4, 1))
        self.scores = nn.Sequential(unit(shape, shape[0], 8), conv(shape, 8, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        boxes, scores = self.boxes(x).sigmoid() * self.scale, self.scores(x).sigmoid()
        return torch.cat([boxes, scores], 1).flatten(2)


@head("classes", kind=("class", "mask", "number"))
class Classes(nn.Module):
    """Logits beside integers, booleans or plain numbers."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.classifier = nn.Linear(shape[0], CLASSES)

    def forward(self, x: Tensor) -> Any:
        logits = self.classifier(x.flatten(2).mean(2))
        if self.kind == "class":
            return logits, logits.argmax(1)
        return (logits, logits > 0) if self.kind == "mask" else {"logits": logits, "size": 3}
