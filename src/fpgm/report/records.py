"""Typed records of the JSON files in a run folder, as far as a report uses them.

The files may come from any version of fpgm, or from elsewhere. Unknown fields are ignored, NaN and
infinite numbers become None, and a value of the wrong type raises a `FieldTypeError`.
The code that renders pages can therefore rely on the types.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from fpgm.utils.text import shorten
from fpgm.utils.typed_json import Decoder, FieldTypeError

Number = float | None
StringMap = Mapping[str, str]

_MAX_DEPTH = 20
"""Maximum nesting of settings and of lists within them."""
_MAX_INTEGER = 2.0**63
"""Larger integers are rejected: no count in a run is this large."""


@dataclass(frozen=True)
class CertificateRecord:
    """The numerical check of a pruned model, as `fpgm prune` writes it."""

    ok: bool
    max_error: Number = None
    tolerance: Number = None


@dataclass(frozen=True)
class SolvedLayerRecord:
    """A layer whose weights were solved by least squares, with its output error."""

    layer: str
    before: Number = None
    after: Number = None


@dataclass(frozen=True)
class RecoveryRecord:
    """The method that recovered accuracy, and its outcome."""

    method: str = ""
    layers: tuple[SolvedLayerRecord, ...] = ()
    steps: Number = 0
    """Steps of distillation that were kept."""


@dataclass(frozen=True)
class ResultsRecord:
    """`results.json`, written by `fpgm prune` or `fpgm train`."""

    model: str = ""
    command: str = ""
    untrained: bool | None = None
    """Whether the original has random weights; None if unknown."""
    accuracy: dict[str, Number] | Number = None
    test_images: Number = None
    certificate: CertificateRecord | None = None
    max_error: Number = None
    recovery: RecoveryRecord | None = None
    asked: StringMap = field(default_factory=dict)
    versions: StringMap = field(default_factory=dict)
    seconds: StringMap = field(default_factory=dict)


@dataclass(frozen=True)
class LayerRecord:
    """One layer in `analysis.json`."""

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
            raise FieldTypeError("layers: norms, distances and places must have the same length")


@dataclass(frozen=True)
class AnalysisRecord:
    """`analysis.json`, written by `fpgm prune` and `fpgm analyze`."""

    layers: tuple[LayerRecord, ...]
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class SensitivityGroupRecord:
    """One channel group in `sensitivity.json`; `harm` is the output error per removed unit."""

    name: str
    harm: tuple[Number, ...]


@dataclass(frozen=True)
class SensitivityRecord:
    """`sensitivity.json`, written by `fpgm sensitivity`."""

    groups: tuple[SensitivityGroupRecord, ...]


@dataclass(frozen=True)
class TimingRecord:
    """One model in one runtime: measured and theoretical speedup over the first model."""

    model: str
    faster: Number = None
    theory: Number = None
    seconds: Number = None
    spread: Number = None


@dataclass(frozen=True)
class BenchRowRecord:
    """All models in one runtime."""

    backend: str
    batch: int
    threads: int
    figures: tuple[TimingRecord, ...]
    theory: Number = None
    """Theoretical speedup of the last model, in files of earlier versions."""
    crowd: str | None = None
    """Why these times are unreliable, or None."""

    @property
    def theoretical_speedup(self) -> Number:
        """MACs of the first model divided by those of the last."""
        last_theory = self.figures[-1].theory if self.figures else None
        return self.theory if last_theory is None else last_theory


@dataclass(frozen=True)
class BenchRecord:
    """`bench.json`, written by `fpgm bench`."""

    rows: tuple[BenchRowRecord, ...]


@dataclass(frozen=True)
class EpochRecord:
    """One line of `metrics.jsonl`."""

    epoch: int
    train_accuracy: Number = None
    test_accuracy: Number = None
    pruned_accuracy: Number = None
    average_accuracy: Number = None


@dataclass(frozen=True)
class EnvironmentRecord:
    """`environment.json`: the command line as a list of words, and all other entries as text."""

    command: tuple[str, ...] = ()
    others: StringMap = field(default_factory=dict)


RecordT = TypeVar("RecordT")


def decode(kind: type[RecordT], value: Any) -> RecordT:
    """Convert parsed JSON to a record, or raise a `FieldTypeError` that names the field.

    >>> decode(TimingRecord, {"model": "small", "faster": float("nan"), "more": 1})
    TimingRecord(model='small', faster=None, theory=None, seconds=None, spread=None)
    >>> decode(TimingRecord, {"model": 3})
    Traceback (most recent call last):
        ...
    fpgm.utils.typed_json.FieldTypeError: model has the wrong type
    """
    return _RecordDecoder().record(kind, value)


def flatten_settings(value: Any, exclude: tuple[str, ...] = ()) -> dict[str, str]:
    """Flatten nested settings to dotted names and text values; leave out what is not set.

    >>> flatten_settings({"train": {"lr": 0.1, "ema": None}, "seed": 0})
    {'train.lr': '0.1', 'seed': '0'}
    """
    if not isinstance(value, dict):
        raise FieldTypeError("it has the wrong type")
    return {name: text for name, text in _iter_settings(value, "", 0) if name not in exclude}


def _iter_settings(value: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth > _MAX_DEPTH:
        raise FieldTypeError(f"{prefix} is nested too deeply")
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _iter_settings(item, f"{prefix}{key}.", depth + 1)
        elif item is not None and item != []:
            yield prefix + key, _format_value(item, depth)


def _format_value(value: Any, depth: int) -> str:
    if depth > _MAX_DEPTH:
        raise FieldTypeError("a list is nested too deeply")
    if isinstance(value, list):
        return ", ".join(_format_value(item, depth + 1) for item in value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    return json.dumps(value)


class _RecordDecoder(Decoder):
    """Accepts files of any version: NaN becomes None, and None the default of a field."""

    def record(self, kind: type[RecordT], item: Any, name: str = "") -> RecordT:
        if isinstance(item, dict):
            defaults = {info.name: info.default for info in fields(kind)}  # type: ignore[arg-type]
            item = {
                key: value
                for key, value in item.items()
                if value is not None or defaults.get(key) in (None, MISSING)
            }
        return super().record(kind, item, name)

    def value(self, hint: Any, value: Any, name: str) -> Any:
        if hint == StringMap:
            return flatten_settings({} if value is None else value)
        if hint == Number or hint is float:
            return self._number(value, name)
        if hint is int:
            number = self._number(value, name)
            if number is None or number != int(number):
                raise self.wrong_type(hint, value, name)
            return int(number)
        return super().value(hint, value, name)

    def _number(self, value: Any, name: str) -> Number:
        """Convert a JSON number to a finite float; None, NaN and infinity become None."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong_type(float, value, name)
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise FieldTypeError(f"{name} is too large")
        return float(value) if math.isfinite(value) else None

    def missing(self, keys: list[str], name: str) -> Exception:
        return FieldTypeError(f"{shorten(keys)} is missing")

    def wrong_type(self, hint: Any, value: Any, name: str) -> Exception:
        return FieldTypeError(f"{name.rpartition('.')[2] or 'it'} has the wrong type")
