"""What a report takes from each file of a folder, as typed values; all else in them is passed over.

Files come from anywhere and from any version: a number that is none becomes None, and anything of
the wrong kind is refused where it is read, so that no page has to doubt what it is made of.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fpgm.utils.text import shorten

Number = float | None
Texts = Mapping[str, str]

_DEEPEST = 20
"""Lists within lists, in what is shown as it is."""
_LARGEST = 2.0**63
"""Whole numbers that are counts of anything are smaller."""


class UnfitError(ValueError):
    """A value of another kind than its place is for."""


@dataclass(frozen=True)
class Certificate:
    """Of `fpgm prune`."""

    ok: bool
    max_error: Number = None
    tolerance: Number = None


@dataclass(frozen=True)
class Solved:
    """A layer that was solved for."""

    layer: str
    before: Number = None
    after: Number = None


@dataclass(frozen=True)
class Recovery:
    """How accuracy was won back."""

    method: str = ""
    layers: tuple[Solved, ...] = ()
    steps: Number = 0
    """Of distillation, as far as it was kept."""


@dataclass(frozen=True)
class Results:
    """Of `results.json`, by `fpgm prune` or `fpgm train`."""

    model: str = ""
    command: str = ""
    accuracy: dict[str, Number] | Number = None
    test_images: Number = None
    certificate: Certificate | None = None
    max_error: Number = None
    recovery: Recovery | None = None
    asked: Texts = field(default_factory=dict)
    versions: Texts = field(default_factory=dict)
    seconds: Texts = field(default_factory=dict)


@dataclass(frozen=True)
class LayerTold:
    """One layer of `analysis.json`."""

    layer: str
    norms: tuple[Number, ...]
    read_groups: tuple[int, ...] = ()
    macs_share: Number = None
    deviation: Number = None
    least: Number = None
    effective_rank: Number = None
    verdict: str = ""
    to_median: tuple[Number, ...] = ()
    places: tuple[tuple[Number, ...], ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.to_median) or len(self.norms), len(self.places) or len(self.norms)}
        if sizes != {len(self.norms)} or any(len(place) != 2 for place in self.places):
            raise UnfitError("layers: as many distances and places as norms are needed")


@dataclass(frozen=True)
class AnalysisTold:
    """Of `analysis.json`."""

    layers: tuple[LayerTold, ...]
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupTold:
    """One group of `sensitivity.json`."""

    name: str
    harm: tuple[Number, ...]


@dataclass(frozen=True)
class SensitivityTold:
    """Of `sensitivity.json`."""

    groups: tuple[GroupTold, ...]


@dataclass(frozen=True)
class Timed:
    """One model in one runtime."""

    model: str
    faster: Number = None
    theory: Number = None


@dataclass(frozen=True)
class TimedRow:
    """All models in one runtime."""

    backend: str
    batch: int
    threads: int
    figures: tuple[Timed, ...]
    theory: Number = None
    """In files of earlier versions: that of the last model."""
    crowd: str | None = None
    """Why its times are not to be relied on, if they are not."""

    @property
    def promised(self) -> Number:
        """How many times fewer MACs the last model takes."""
        own = self.figures[-1].theory if self.figures else None
        return self.theory if own is None else own


@dataclass(frozen=True)
class BenchTold:
    """Of `bench.json`."""

    rows: tuple[TimedRow, ...]


@dataclass(frozen=True)
class Epoch:
    """One line of `metrics.jsonl`."""

    epoch: int
    train_accuracy: Number = None
    test_accuracy: Number = None
    pruned_accuracy: Number = None
    average_accuracy: Number = None


@dataclass(frozen=True)
class Environment:
    """Of `environment.json`: the command as its words, and the rest as it is."""

    command: tuple[str, ...] = ()
    others: Texts = field(default_factory=dict)


Record = TypeVar("Record")


def decode(kind: type[Record], value: Any) -> Record:
    """A record from what JSON holds; what does not fit is an `UnfitError` that says where.

    >>> decode(Timed, {"model": "small", "faster": float("nan"), "more": 1})
    Timed(model='small', faster=None, theory=None)
    >>> decode(Timed, {"model": 3})
    Traceback (most recent call last):
        ...
    fpgm.report.records.UnfitError: model is of another kind
    """
    found: Record = _as(kind, value, "it")
    return found


def texts(value: Any, apart: tuple[str, ...] = ()) -> dict[str, str]:
    """Settings as they are shown: nested ones by dotted names, nothing that is not set.

    >>> texts({"train": {"lr": 0.1, "ema": None}, "seed": 0})
    {'train.lr': '0.1', 'seed': '0'}
    """
    if not isinstance(value, dict):
        raise UnfitError("it is of another kind")
    return {name: told for name, told in _flat(value, "", 0) if name not in apart}


def _flat(value: dict[str, Any], above: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth > _DEEPEST:
        raise UnfitError(f"{above} goes too deep")
    for key, own in value.items():
        if isinstance(own, dict):
            yield from _flat(own, f"{above}{key}.", depth + 1)
        elif own is not None and own != []:
            yield above + key, _shown(own, depth)


def _shown(value: Any, depth: int) -> str:
    if depth > _DEEPEST:
        raise UnfitError("a list goes too deep")
    if isinstance(value, list):
        return ", ".join(_shown(item, depth + 1) for item in value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    return json.dumps(value)


def _as(hint: Any, value: Any, where: str) -> Any:
    """A value of an annotated kind, for the kinds that records are made of."""
    inside = get_args(hint)
    origin = get_origin(hint)
    if hint == Number:
        return _number(value, where)
    if hint == Texts:
        return texts({} if value is None else value)
    if origin in (Union, UnionType):
        return _any_of(inside, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_as(inside[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _as(inside[1], item, where) for key, item in value.items()}
    if hint is int:
        whole = _number(value, where)
        if whole is not None and whole == int(whole):
            return int(whole)
    elif is_dataclass(hint) and isinstance(value, dict):
        return _record(hint, value)
    elif hint in (str, bool) and isinstance(value, hint):
        return value
    raise UnfitError(f"{where} is of another kind")


def _any_of(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in hints:
        return None
    numbers = [Number] if float in hints else []
    for hint in [*numbers, *(h for h in hints if h not in (float, type(None)))]:
        if hint == Number and isinstance(value, dict):
            continue
        return _as(hint, value, where)
    raise UnfitError(f"{where} is of another kind")


def _number(value: Any, where: str) -> float | None:
    """A finite number, or None for what is no number by its own account."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnfitError(f"{where} is of another kind")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise UnfitError(f"{where} is too large")
    return float(value) if math.isfinite(value) else None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _record(kind: Any, value: dict[str, Any]) -> Any:
    found = {}
    missing = []
    for own in fields(kind):
        if own.name in value:
            given = value[own.name]
            blank = given is None and own.default is not MISSING and own.default is not None
            found[own.name] = own.default if blank else _as(_hints(kind)[own.name], given, own.name)
        elif own.default is MISSING and own.default_factory is MISSING:
            missing.append(own.name)
    if missing:
        raise UnfitError(f"{shorten(missing)} is missing")
    return kind(**found)
