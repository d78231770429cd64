"""Models built in unusual ways: odd containers, shared modules, own copying, scripted parts."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import floats, image, named, network, pooled, together, unit

FAMILY = "containers"
IMAGES = (image(), image(size=20, batch=3))


@network(FAMILY, *IMAGES)
class ByName(nn.Module):
    """A ModuleDict, run in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"last": nn.Conv2d(8, 4, 1), "b": unit(8, 8), "a": unit(3, 8)})
        self.order = ["a", "b", "last"]

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.parts[name](x)
        return x


@network(FAMILY, *IMAGES)
class ParametersInLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(8, 3), (8, 8), (4, 8)]
        self.kernels = nn.ParameterList(torch.randn(o, i, 3, 3) * 0.2 for o, i in sizes)
        self.shifts = nn.ParameterDict({str(n): torch.randn(o) for n, (o, _) in enumerate(sizes)})

    def forward(self, x: Tensor) -> Tensor:
        for n, kernel in enumerate(self.kernels):
            x = F.conv2d(x, kernel, self.shifts[str(n)], padding=1)
            x = x if n == 2 else x.relu()
        return x


@network(FAMILY, *IMAGES)
class ModulesInPlainList(nn.Module):
    """A list of modules beside the registered ones: the same modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.steps = [self.a, self.b, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@network(FAMILY, *IMAGES)
class HiddenModules(nn.Module):
    """Layers that torch does not know of: in a plain list only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = unit(3, 8), nn.Conv2d(8, 4, 1)
        self.hidden = [nn.Conv2d(8, 8, 3, 1, 1)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden[0].to(x.dtype)
        return self.head(hidden(self.stem(x)).relu())


class OwnCopy(nn.Module):
    """A layer with a way of its own to be copied."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.sizes = before, after
        self.conv = nn.Conv2d(before, after, 3, 1, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        new = OwnCopy(*self.sizes)
        new.conv = copy.deepcopy(self.conv, memo)
        memo[id(self)] = new
        return new.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


@network(FAMILY, *IMAGES)
def copies_itself() -> nn.Module:
    return nn.Sequential(unit(3, 8), OwnCopy(8, 8), unit(8, 8), nn.Conv2d(8, 4, 1))


@network(FAMILY, *IMAGES)
class HoldsLock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.head(self.b(self.a(x)))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + x.tanh()


@network(FAMILY, *IMAGES)
def scripted_activation() -> nn.Module:
    return nn.Sequential(unit(3, 8), torch.jit.script(Scripted()), unit(8, 8), nn.Conv2d(8, 4, 1))


@network(FAMILY, *IMAGES)
def scripted_layer() -> nn.Module:
    inside = torch.jit.script(nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()))
    return nn.Sequential(unit(3, 8), inside, unit(8, 8), unit(8, 8), nn.Conv2d(8, 4, 1))


@network(FAMILY, *IMAGES)
class SharedModule(nn.Module):
    """One norm and one activation in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(8), nn.PReLU(8)
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), self.norm, self.act)
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), self.norm, self.act)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


class Tree(nn.Module):
    """A module that holds modules of its own kind."""

    def __init__(self, depth: int, before: int, after: int) -> None:
        super().__init__()
        self.left = Tree(depth - 1, before, after) if depth else unit(before, after)
        self.right = Tree(depth - 1, after, after) if depth else unit(after, after)
        self.root = unit(2 * after, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.left(x)
        return self.root(torch.cat([a, self.right(a)], 1))


@network(FAMILY, *IMAGES)
def deep_aggregation() -> nn.Module:
    return nn.Sequential(Tree(1, 3, 6), nn.Conv2d(6, 4, 1))


@network(FAMILY, *IMAGES)
class LambdasAndPartials(nn.Module):
    """Functions in attributes, one of them bound to a module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.act = lambda x: x.clamp(0, 3)
        self.pool = functools.partial(F.avg_pool2d, kernel_size=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.act(self.b(self.act(self.a(x))))))


@network(FAMILY, *IMAGES)
class BoundMethod(nn.Module):
    """A method is kept in an attribute, and with it the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.step = self.features

    def features(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(x))


@network(FAMILY, *IMAGES)
class ParentReference(nn.Module):
    """A child knows its parent without being its parent's parent."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.b.__dict__["owner"] = self

    def forward(self, x: Tensor) -> Tensor:
        return self.b.__dict__["owner"].head(self.b(self.a(x)))


@network(FAMILY, *IMAGES)
class Hooked(nn.Module):
    """Forward hooks that change what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.a.register_forward_hook(lambda m, args, out: out * 0.5 + 0.1)
        self.b.register_forward_pre_hook(lambda m, args: (args[0].clamp(max=2),))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


@network(FAMILY, *IMAGES)
class FeaturesByHook(nn.Module):
    """What a hook keeps is used by the head and then forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = unit(3, 8), unit(8, 8)
        self.head = nn.Conv2d(16, 4, 1)
        self.a.register_forward_hook(self.keep)
        self.kept: list[Tensor] = []

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept.append(out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return self.head(torch.cat([self.kept.pop(), y], 1))


@network(FAMILY, together(image(), image()), together(image(size=20), image(size=20)))
class Siamese(nn.Module):
    """Two images, one encoder, a distance and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(unit(3, 8), unit(8, 8))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = pooled(self.encoder(x)), pooled(self.encoder(y))
        return self.head(torch.cat([a, b], 1)), (a - b).pow(2).sum(1).sqrt()


@network(FAMILY, together(image(), image(), image()))
class Triplet(nn.Module):
    """Normalised embeddings of three images; all are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(unit(3, 8), unit(8, 8))
        self.embed = nn.Linear(8, 6)

    def forward(self, *images: Tensor) -> list[Tensor]:
        return [F.normalize(self.embed(pooled(self.encoder(x))), dim=1) for x in images]


@network(
    FAMILY, named(pixels=image(), scale=floats(1)), named(pixels=image(size=20), scale=floats(1))
)
class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, *, pixels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"map": self.head(self.b(self.a(pixels) * scale))}


@network(FAMILY, lambda: ({"image": torch.randn(2, 3, 16, 16), "extra": [torch.randn(2, 4)]},))
class NestedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.head = unit(3, 8), nn.Linear(12, 10), nn.Linear(10, 4)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        both = torch.cat([pooled(self.a(batch["image"])), batch["extra"][0]], 1)
        return self.head(self.mix(both).relu())


@network(FAMILY, *IMAGES)
class OwnGetAttribute(nn.Module):
    """Attributes of the model inside are found through the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1))
        self.inside.width = 8

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


@network(FAMILY, *IMAGES)
class UnusedLayers(nn.Module):
    """Layers that never run."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.unused, self.other = unit(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


@network(FAMILY, *IMAGES)
class FrozenParameters(nn.Module):
    """Layers that do not train beside ones that do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
        return self.head(self.b(x))
