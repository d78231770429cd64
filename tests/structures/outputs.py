"""Outputs in containers of every kind, and outputs that are not plain floats."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import image, network, pooled, unit

FAMILY = "outputs"
IMAGES = (image(), image(size=20, batch=3))


class DictResult(dict):  # type: ignore[type-arg]
    """A dict whose items are attributes too, as in transformers."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class ListResult(list):  # type: ignore[type-arg]
    """A list with a name."""


class TupleResult(tuple):  # type: ignore[type-arg]
    """A tuple with a name."""


class SlotsResult:
    """An object without a dict of its own."""

    __slots__ = ("logits", "maps")

    def __init__(self, logits: Tensor, maps: Tensor) -> None:
        self.logits, self.maps = logits, maps


class PlainResult:
    """An object like any other."""

    def __init__(self, logits: Tensor, maps: Tensor) -> None:
        self.logits, self.maps = logits, maps


@dataclass(slots=True)
class SlotsDataclass:
    logits: Tensor
    maps: Tensor


@dataclass(frozen=True)
class FrozenDataclass:
    logits: Tensor
    maps: Tensor


class NamedResult(NamedTuple):
    logits: Tensor
    maps: Tensor


OldNamed = namedtuple("OldNamed", "logits maps")


def generated(*parts: Tensor) -> Iterator[Tensor]:
    yield from parts


class TwoHeads(nn.Module):
    """Ten classes and a map; what `pack` makes of the two is the output."""

    pack: Callable[[Tensor, Tensor], Any]

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 8), unit(8, 8))
        self.logits = nn.Linear(8, 10)
        self.maps = nn.Conv2d(8, 6, 1)

    def forward(self, x: Tensor) -> Any:
        f = self.stem(x)
        return type(self).pack(self.logits(pooled(f)), self.maps(f))


PACKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "OutputDictSubclass": lambda a, b: DictResult(logits=a, maps=b),
    "OutputListSubclass": lambda a, b: ListResult([a, b]),
    "OutputTupleSubclass": lambda a, b: TupleResult((a, b)),
    "OutputSlots": SlotsResult,
    "OutputObject": PlainResult,
    "OutputSlotsDataclass": SlotsDataclass,
    "OutputFrozenDataclass": FrozenDataclass,
    "OutputNamedTuple": NamedResult,
    "OutputOldNamedTuple": OldNamed,
    "OutputMappingProxy": lambda a, b: types.MappingProxyType({"logits": a, "maps": b}),
    "OutputSet": lambda a, b: {a, b},
    "OutputFrozenSet": lambda a, b: frozenset((a, b)),
    "OutputGenerator": generated,
    "OutputOrderedDict": lambda a, b: OrderedDict(logits=a, maps=b),
    "OutputUserDict": lambda a, b: UserDict(logits=a, maps=b),
    "OutputNested": lambda a, b: {"a": [a, {"b": (b, None)}], "n": 3},
    "OutputIntegerKeys": lambda a, b: {0: a, 1: b},
    "OutputNumpy": lambda a, b: (a.detach().numpy(), b),
    "OutputList": lambda a, b: {"logits": a.tolist(), "maps": b},
    "OutputOnlyList": lambda a, b: a.tolist(),
    "OutputNumpyStack": lambda a, b: np.stack([a.detach().numpy(), a.detach().numpy() * 2]),
    "OutputClass": lambda a, b: {"class": a.argmax(1), "maps": b},
    "OutputOnlyClass": lambda a, b: a.argmax(1),
    "OutputClassNumbers": lambda a, b: [int(i) for i in a.argmax(1)],
    "OutputBoolMask": lambda a, b: (a, b > 0),
    "OutputSigns": lambda a, b: (a.sign().to(torch.int8), b),
    "OutputItem": lambda a, b: {"score": a.max().item(), "logits": a},
    "OutputTopK": lambda a, b: a.topk(3, 1),
    "OutputMaskedInfinity": lambda a, b: a.masked_fill(torch.arange(10) % 3 == 0, float("-inf")),
    "OutputMaskedLarge": lambda a, b: a.masked_fill(torch.arange(10) % 3 == 0, -1e9),
    "OutputNotANumber": lambda a, b: (a.masked_fill(torch.arange(10) == 4, float("nan")), b),
    "OutputTwoScales": lambda a, b: torch.cat([a[:, :4].sigmoid() * 1280, a[:, 4:].sigmoid()], 1),
    "OutputTinyBesideLarge": lambda a, b: (a * 1e6, b * 1e-6),
    "OutputTextAndNone": lambda a, b: {"name": "two", "none": None, "logits": a, "b": b},
    "OutputUint8Image": lambda a, b: (b.sigmoid() * 255).to(torch.uint8),
    "OutputHalf": lambda a, b: a.half(),
    "OutputComplex": lambda a, b: torch.complex(a, a * 2),
    "OutputSparse": lambda a, b: (a, b.relu().flatten(1).to_sparse().to_dense()),
}


def _register(name: str, pack: Callable[[Tensor, Tensor], Any]) -> None:
    kind = type(name, (TwoHeads,), {"pack": staticmethod(pack), "__module__": __name__})
    globals()[name] = kind  # so that it can be found again by pickle and deepcopy
    network(FAMILY, *IMAGES)(kind)


for _name, _pack in PACKS.items():
    _register(_name, _pack)


@network("random outputs", *IMAGES)
class MonteCarloDropout(nn.Module):
    """Dropout that stays on in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 8), unit(8, 8))
        self.hidden, self.head = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(pooled(self.stem(x))).relu()
        return self.head(F.dropout(h, 0.3, training=True))


@network("random outputs", *IMAGES)
class VariationalSample(nn.Module):
    """A VAE that samples in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(unit(3, 8), unit(8, 8, stride=2))
        self.mean, self.spread = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 3, 3, 1, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = self.encoder(x)
        mean, spread = self.mean(f), self.spread(f)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decoder(z), mean, spread


@network("random outputs", *IMAGES)
class VariationalMeanOnly(nn.Module):
    """The latent is not an output, so its channels may go."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = unit(3, 8, stride=2)
        self.both = nn.Conv2d(8, 12, 1)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 3, 3, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.both(self.encoder(x)).chunk(2, 1)
        z = mean + torch.randn_like(mean) * spread.tanh() if self.training else mean
        return self.decoder(z)


@network("random outputs", *IMAGES)
class NoisyInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(unit(3, 8), unit(8, 8), nn.Conv2d(8, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.1 * torch.randn(x.shape, dtype=x.dtype))


@network("random outputs", *IMAGES)
class SampledClasses(nn.Module):
    """Classes drawn from the softmax, beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 8), unit(8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.head(pooled(self.stem(x))).softmax(1)
        return p, torch.multinomial(p.float(), 1)


@network("random outputs", *IMAGES)
class GumbelSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 8), unit(8, 8))
        self.choose, self.head = nn.Linear(8, 4), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        f = pooled(self.stem(x))
        weights = F.gumbel_softmax(self.choose(f), tau=1.0)
        return self.head(f) * weights.sum(1, keepdim=True) + weights[:, :1]
