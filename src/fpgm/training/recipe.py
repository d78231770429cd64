"""A recipe: everything that determines the result of a training, read from a TOML file.

A recipe may extend another in the same folder (`extends = "other.toml"`) and then contains only
what differs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from fpgm.data.registry import DataSpec
from fpgm.errors import FileError, RequestError
from fpgm.models.registry import names_code
from fpgm.planning.width_rounding import ALIGN, Rounding
from fpgm.tracing.residual import Residual
from fpgm.training.recipes import SHIPPED
from fpgm.utils.safe_read import parse_json, read_text
from fpgm.utils.text import did_you_mean, reason
from fpgm.utils.typed_json import Decoder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUDGETS = {"rate", "macs", "params"}


@dataclass(frozen=True)
class ModelConfig:
    """The network, and where its weights come from."""

    name: str
    """As on the command line: built in, torchvision:NAME, timm:NAME or file.py:factory."""
    weights: str | None = None
    """Trained weights to start from; none: from scratch."""
    compact: str | None = None
    """A file that fpgm.save wrote: training continues with the compact model."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimizer, its schedule, and options of the loss and the weights."""

    epochs: int
    lr: float
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: Literal["constant", "step", "cosine", "linear"] = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup: int = 0
    warmup_lr: float | None = None
    label_smoothing: float = 0.0
    ema: float | None = None


@dataclass(frozen=True)
class PruneConfig:
    """What to prune and when: the options of `fpgm.SoftPruner`."""

    rate: float | None = None
    macs: float | None = None
    params: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    criterion: str = "fpgm"
    distance: str = "l2"
    residual: Residual = "coupled"
    ignore: tuple[str, ...] = ()
    align: int = ALIGN
    rounding: Rounding = "nearest"
    min_channels: int = 1
    mode: Literal["soft", "hard"] = "soft"
    interval: int = 1
    start: int = 1
    end: int | None = None
    ramp: int = 0
    hold: int | None = None
    approximate: bool = False
    seed: int = 0

    @property
    def first(self) -> int:
        """The first epoch after which units are pruned."""
        return self.start + self.interval - 1


@dataclass(frozen=True)
class DistillConfig:
    """A teacher whose outputs are learned in addition to the labels."""

    model: str
    weights: str
    share: float = 0.5
    temperature: float = 4.0


@dataclass(frozen=True)
class RunConfig:
    """How the machine is used: options that affect only speed and rounding."""

    precision: Literal["no", "bf16", "fp16"] = "no"
    accumulate: int = 1
    channels_last: bool = False
    compile: bool = False
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class Recipe:
    """The model, the data, the training and the pruning of one run."""

    model: ModelConfig
    data: DataSpec
    train: TrainConfig
    prune: PruneConfig | None = None
    distill: DistillConfig | None = None
    run: RunConfig = RunConfig()
    seed: int = 0

    def digest(self) -> str:
        """Return the digest by which a run is recognized when it is resumed."""
        table = asdict(self)
        for part, name, default in _ADDED_LATER:
            if table[part][name] == default:
                del table[part][name]
        text = json.dumps(table, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_ADDED_LATER = (("data", "cutout", 0),)
"""Options that did not exist when earlier runs began: their defaults do not count in a digest."""


def read_recipe(
    path: str | Path, changes: Sequence[str] = (), *, allow_code: bool = False
) -> Recipe:
    """Read a recipe file; `changes` such as "train.epochs=3" replace single values.

    A file that names Python code (`net.py:make`) is refused unless `allow_code` says that its
    author is trusted; `changes` may name code, because the caller wrote them.
    """
    own = _read(Path(path))
    table = _apply_changes(own, changes)
    if not allow_code:
        _refuse_code(own, changes, str(path))
    return make_recipe(table, str(path))


def make_recipe(table: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """Create a recipe from nested tables; unknown names and wrong types are rejected."""
    recipe = _RecipeDecoder(where).record(Recipe, table)
    _check(recipe, where)
    return recipe


def _read(path: Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    own_place = os.path.realpath(path)
    if own_place in above:
        raise FileError(f"{path} extends itself: its chain of extends is circular.")
    own = _parse(path)
    base = own.pop("extends", None)
    if base is None:
        return own
    return _merge(_read(_resolve_base(path, str(base)), (*above, own_place)), own)


def _resolve_base(path: Path, base: str) -> Path:
    """Find the file a recipe extends: next to it, or an included recipe by its name."""
    shipped = SHIPPED / f"{base}.toml"
    return shipped if shipped.is_file() else path.parent / base


def _parse(path: Path) -> dict[str, Any]:
    """Parse TOML, or the JSON in a run folder."""
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = read_text(path)
        table: Any = parse_json(text) if kind == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise FileError(f"The recipe {path} cannot be read: {reason(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not valid {kind}: {error}.") from None
    if not isinstance(table, dict):
        raise FileError(f"{path} is not a recipe: it contains no table of options.")
    if kind == "JSON":
        table.pop("digest", None)
    return table


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables; everything else is replaced."""
    result = dict(base)
    for key, value in own.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            if key == "prune" and not BUDGETS.isdisjoint(value):
                # One budget replaces another.
                old = {name: option for name, option in old.items() if name not in BUDGETS}
            value = _merge(old, value)
        result[key] = value
    return result


def _apply_changes(table: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise RequestError(f"--set is {change!r}: write a name and a value, train.epochs=3.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # a word needs no quotes
        nested: Any = value
        for part in reversed(name.strip().split(".")):
            nested = {part: nested}
        table = _merge(table, nested)
    return table


_SPECS = (("model", "name"), ("distill", "model"))
"""Settings that name a network."""


def _refuse_code(own: Mapping[str, Any], changes: Sequence[str], where: str) -> None:
    """Refuse a file that names code, unless a change names another network instead."""
    changed = {change.partition("=")[0].strip() for change in changes}
    for part, name in _SPECS:
        table = own.get(part)
        spec = table.get(name) if isinstance(table, dict) else None
        if isinstance(spec, str) and names_code(spec) and f"{part}.{name}" not in changed:
            raise RequestError(
                f"{where}: {part}.{name} is {spec!r}, which is code that would be run: if you "
                "trust it, pass --allow-code (in Python: allow_code=True)."
            )


UNSET = "none"
"""Unsets a value of an extended recipe, since TOML has no null."""


class _RecipeDecoder(Decoder):
    """Decodes a recipe; errors name the recipe and say what to give instead."""

    error = RequestError

    def __init__(self, where: str) -> None:
        self.where = where

    def value(self, hint: Any, value: Any, name: str) -> Any:
        kinds = get_args(hint)
        if value == UNSET and NoneType in kinds and str not in kinds:
            return None
        return super().value(hint, value, name)

    def check_unknown(self, kind: type, key: Any, name: str) -> None:
        known = [own.name for own in fields(kind)]
        hint = did_you_mean(key, known)
        among = f": {hint}" if hint else f" among {', '.join(known)}."
        full = f"{name}.{key}" if name else key
        raise RequestError(f"{self.where}: there is no {full!r}{among}")

    def missing(self, keys: list[str], name: str) -> Exception:
        full = f"{name}.{keys[0]}" if name else keys[0]
        return RequestError(f"{self.where}: {full} is missing.")

    def wrong_type(self, hint: Any, value: Any, name: str) -> Exception:
        if is_dataclass(hint):
            return RequestError(f"{self.where}: {name} is {value!r}, not a table of options.")
        hints = hint if isinstance(hint, tuple) else (hint,)
        expected = " or ".join(map(_describe_type, hints))
        return RequestError(f"{self.where}: {name} is {value!r}: give {expected}.")


_TYPES = {
    tuple: "a list",
    dict: "a table",
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
}


def _describe_type(hint: Any) -> str:
    """Describe the values of a type, after "give"."""
    if get_origin(hint) is Literal:
        choices = ", ".join(repr(choice) for choice in get_args(hint))
        return f"one of {choices}" if "," in choices else choices
    return _TYPES[get_origin(hint) or hint]


def _check(recipe: Recipe, where: str) -> None:
    """Check what types cannot express."""
    data, train, run = recipe.data, recipe.train, recipe.run
    rules = [
        (
            recipe.model.weights == "",
            "it starts from trained weights: pass --set model.weights=FILE",
        ),
        (
            recipe.prune is not None and recipe.prune.first > train.epochs,
            "prune.start and prune.interval put the first pruning after the last epoch",
        ),
        (
            recipe.prune is not None
            and recipe.prune.end is not None
            and recipe.prune.first > recipe.prune.end,
            "prune.start and prune.interval put the first pruning after prune.end",
        ),
        (
            recipe.prune is not None and (recipe.prune.hold or 1) > train.epochs,
            "prune.hold comes after the last epoch",
        ),
        (data.batch < 1, f"data.batch is {data.batch}: give at least 1"),
        (train.epochs < 1, f"train.epochs is {train.epochs}: give at least 1"),
        (not 0 < train.lr < math.inf, f"train.lr is {train.lr}: give a number above 0"),
        (
            not 0 <= train.momentum < 1,
            f"train.momentum is {train.momentum}: give at least 0 and below 1",
        ),
        (
            train.nesterov and train.optimizer == "sgd" and not train.momentum,
            "train.nesterov needs train.momentum above 0",
        ),
        (
            not 0 <= train.weight_decay < math.inf,
            f"train.weight_decay is {train.weight_decay}: give 0 or more",
        ),
        (not 0 < train.gamma < math.inf, f"train.gamma is {train.gamma}: give a number above 0"),
        (train.warmup < 0, f"train.warmup is {train.warmup}: give 0 epochs or more"),
        (
            not 0 <= train.label_smoothing < 1,
            f"train.label_smoothing is {train.label_smoothing}: give at least 0 and below 1",
        ),
        (
            data.limit is not None and data.limit < 1,
            f"data.limit is {data.limit}: give at least 1",
        ),
        (data.crop < 0, f"data.crop is {data.crop}: give 0 pixels or more"),
        (data.cutout < 0, f"data.cutout is {data.cutout}: give 0 pixels or more"),
        (data.size < 1, f"data.size is {data.size}: give at least 1"),
        (data.workers < 0, f"data.workers is {data.workers}: give 0 or more"),
        (
            data.std is not None and not all(0 < s < math.inf for s in data.std),
            "data.std contains a number that is not above 0",
        ),
        (
            not -(2**63) <= recipe.seed < 2**63,
            f"seed is {recipe.seed}: give a number that fits in 64 bits",
        ),
        (
            recipe.distill is not None and not 0 <= recipe.distill.share <= 1,
            "distill.share is a fraction of the loss: give a number from 0 to 1",
        ),
        (
            recipe.distill is not None and not 0 < recipe.distill.temperature < math.inf,
            "distill.temperature must be above 0",
        ),
        (
            recipe.model.compact is not None and recipe.model.weights is not None,
            "model.compact holds weights: leave model.weights out",
        ),
        (run.accumulate < 1, f"run.accumulate is {run.accumulate}: give at least 1"),
        (run.keep_checkpoints < 1, "run.keep_checkpoints must be at least 1"),
        (
            train.ema is not None and not 0 < train.ema < 1,
            f"train.ema is {train.ema}: give a decay between 0 and 1, such as 0.999",
        ),
        (
            train.schedule == "step" and not train.milestones,
            "train.schedule is 'step' and train.milestones is empty: name the epochs",
        ),
        (
            (data.mean is None) != (data.std is None),
            "data.mean and data.std go together: give both or neither",
        ),
        (
            recipe.model.compact is not None and recipe.prune is not None,
            "model.compact continues training a pruned model: leave [prune] out",
        ),
    ]
    for broken, message in rules:
        if broken:
            raise RequestError(f"{where}: {message}.")
