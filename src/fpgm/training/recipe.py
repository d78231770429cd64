"""A recipe: everything that decides what training gives, read from a TOML file. Values only.

A recipe may build on another (`extends = "other.toml"`, beside it), and states only what differs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fpgm.data.registry import Wanted
from fpgm.errors import FileError, RequestError
from fpgm.models.registry import names_code
from fpgm.planning.budget import ALIGN
from fpgm.training.recipes import SHIPPED
from fpgm.utils.safe_read import parsed, text_of
from fpgm.utils.text import reason

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

BUDGETS = {"rate", "macs", "params"}


@dataclass(frozen=True)
class ModelPart:
    """Which network, and where its weights come from."""

    name: str
    """As on the command line: built in, torchvision:NAME, timm:NAME or file.py:factory."""
    weights: str | None = None
    """Trained weights to start from; none: from scratch."""
    compact: str | None = None
    """A file that fpgm.save wrote: training goes on with the compact model."""


@dataclass(frozen=True)
class TrainPart:
    """The optimizer, its schedule, and what is done to the loss and the weights."""

    epochs: int
    lr: float
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup: int = 0
    warmup_lr: float | None = None
    label_smoothing: float = 0.0
    ema: float | None = None


@dataclass(frozen=True)
class PrunePart:
    """How much, which, where and when: the options of `fpgm.SoftPruner`."""

    rate: float | None = None
    macs: float | None = None
    params: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    criterion: str = "fpgm"
    distance: str = "l2"
    residual: str = "coupled"
    ignore: tuple[str, ...] = ()
    align: int = ALIGN
    rounding: str = "nearest"
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
        """The first epoch at whose end something goes."""
        return self.start + self.interval - 1


@dataclass(frozen=True)
class DistillPart:
    """A teacher whose answers are learned beside the labels."""

    model: str
    weights: str
    share: float = 0.5
    temperature: float = 4.0


@dataclass(frozen=True)
class RunPart:
    """How the machine is used: what changes speed and, at most, rounding."""

    precision: Literal["no", "bf16", "fp16"] = "no"
    accumulate: int = 1
    channels_last: bool = False
    compile: bool = False
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, how, and what is pruned meanwhile."""

    model: ModelPart
    data: Wanted
    train: TrainPart
    prune: PrunePart | None = None
    distill: DistillPart | None = None
    run: RunPart = RunPart()
    seed: int = 0

    def digest(self) -> str:
        """What a run is known by when it is resumed."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_recipe(
    path: str | Path, changes: Sequence[str] = (), *, allow_code: bool = False
) -> Recipe:
    """Read a recipe file; `changes` such as "train.epochs=3" replace single values.

    A file that names Python code (`net.py:make`) is refused unless `allow_code` says that its
    author is trusted; `changes` may name code, because the caller wrote them.
    """
    own = _read(Path(path))
    table = _changed(own, changes)
    if not allow_code:
        _refuse_code(own, changes, str(path))
    return make_recipe(table, str(path))


def make_recipe(table: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """A recipe from nested tables; unknown names and wrong kinds are refused."""
    recipe = _fill(Recipe, table, "", where)
    _check(recipe, where)
    return recipe


def _read(path: Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    own_place = os.path.realpath(path)
    if own_place in above:
        raise FileError(f"{path} builds on itself: its extends come round in a circle.")
    own = _parsed(path)
    base = own.pop("extends", None)
    if base is None:
        return own
    return _merged(_read(_beside(path, str(base)), (*above, own_place)), own)


def _beside(path: Path, base: str) -> Path:
    """The file a recipe builds on: beside it, or a shipped recipe by its name."""
    shipped = SHIPPED / f"{base}.toml"
    return shipped if shipped.is_file() else path.parent / base


def _parsed(path: Path) -> dict[str, Any]:
    """TOML, or the JSON in a run's folder."""
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = text_of(path)
        table: Any = parsed(text) if kind == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise FileError(f"The recipe {path} cannot be read: {reason(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is no {kind}: {error}.") from None
    if not isinstance(table, dict):
        raise FileError(f"{path} is no recipe: it holds no table of options.")
    if kind == "JSON":
        table.pop("digest", None)
    return table


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Tables join, everything else is replaced."""
    result = dict(base)
    for key, value in own.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            if key == "prune" and not BUDGETS.isdisjoint(value):
                # One budget takes another's place.
                old = {name: option for name, option in old.items() if name not in BUDGETS}
            value = _merged(old, value)
        result[key] = value
    return result


def _changed(table: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
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
        table = _merged(table, nested)
    return table


_SPECS = (("model", "name"), ("distill", "model"))
"""Settings that name a network."""


def _refuse_code(own: Mapping[str, Any], changes: Sequence[str], where: str) -> None:
    """Refuse a file that names code, where no change names another network instead."""
    changed = {change.partition("=")[0].strip() for change in changes}
    for part, name in _SPECS:
        table = own.get(part)
        spec = table.get(name) if isinstance(table, dict) else None
        if isinstance(spec, str) and names_code(spec) and f"{part}.{name}" not in changed:
            raise RequestError(
                f"{where}: {part}.{name} is {spec!r}, which is code that would be run: if you "
                "trust it, give --allow-code (in Python: allow_code=True)."
            )


def _fill(kind: type[T], table: Any, name: str, where: str) -> T:
    """A dataclass from a table."""
    if not isinstance(table, Mapping):
        raise RequestError(f"{where}: {name} is {table!r}, not a table of options.")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else f" among {', '.join(known)}."
            raise RequestError(f"{where}: there is no {_join(name, key)!r}{hint}")
    for key, f in known.items():
        if key not in table and f.default is MISSING and f.default_factory is MISSING:
            raise RequestError(f"{where}: {_join(name, key)} is missing.")
    return kind(
        **{key: _value(hints[key], value, _join(name, key), where) for key, value in table.items()}
    )


UNSET = "none"
"""Stands for no value where another recipe has one: TOML has no word for it."""


def _value(hint: Any, value: Any, name: str, where: str) -> Any:
    """One option, brought to its kind if that loses nothing."""
    if get_origin(hint) is UnionType:
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        unset = value is None or (value == UNSET and str not in kinds)
        return None if unset else _value(kinds[0], value, name, where)
    if hasattr(hint, "__dataclass_fields__"):
        return _fill(hint, value, name, where)
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        choices = ", ".join(repr(choice) for choice in get_args(hint))
        raise RequestError(f"{where}: {name} is {value!r}: give one of {choices}.")
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_value(get_args(hint)[0], item, name, where) for item in value)
    if get_origin(hint) is dict and isinstance(value, Mapping):
        return {str(k): _value(get_args(hint)[1], v, name, where) for k, v in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint:
        return value
    wanted = {tuple: "a list", dict: "a table", int: "a whole number", float: "a number",
              str: "text", bool: "true or false"}[get_origin(hint) or hint]  # fmt: skip
    raise RequestError(f"{where}: {name} is {value!r}: give {wanted}.")


def _check(recipe: Recipe, where: str) -> None:
    """What no kind can express."""
    data, train, run = recipe.data, recipe.train, recipe.run
    rules = [
        (
            recipe.model.weights == "",
            "it starts from trained weights: give them, --set model.weights=FILE",
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
        (not 0 <= train.momentum < 1, f"train.momentum is {train.momentum}: give 0 up to below 1"),
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
            f"train.label_smoothing is {train.label_smoothing}: give 0 up to below 1",
        ),
        (
            data.limit is not None and data.limit < 1,
            f"data.limit is {data.limit}: give at least 1",
        ),
        (data.crop < 0, f"data.crop is {data.crop}: give 0 pixels or more"),
        (data.size < 1, f"data.size is {data.size}: give at least 1"),
        (data.workers < 0, f"data.workers is {data.workers}: give 0 or more"),
        (
            data.std is not None and not all(0 < s < math.inf for s in data.std),
            "data.std holds a number that is not above 0",
        ),
        (not -(2**63) <= recipe.seed < 2**63, f"seed is {recipe.seed}: give a smaller number"),
        (
            recipe.distill is not None and not 0 <= recipe.distill.share <= 1,
            "distill.share is a share of the loss: give 0 to 1",
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
            "model.compact goes on training a pruned model: leave [prune] out",
        ),
    ]
    for broken, message in rules:
        if broken:
            raise RequestError(f"{where}: {message}.")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
