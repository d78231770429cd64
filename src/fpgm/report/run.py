"""What a folder of results holds, read as JSON and nothing else: no model is built for a report."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fpgm.errors import FileError, PlanError
from fpgm.pruning.plan import Plan
from fpgm.report.records import (
    AnalysisTold,
    BenchTold,
    Environment,
    Epoch,
    Results,
    SensitivityTold,
    Texts,
    UnfitError,
    decode,
    texts,
)
from fpgm.utils.safe_read import parsed, text_of
from fpgm.utils.text import reason

LARGEST = 64 * 2**20
"""Bytes of a file that are still read."""
COUNTED = 2**63
"""MACs, parameters and units are fewer."""


@dataclass(frozen=True)
class Run:
    """One run of `fpgm prune` or `fpgm train`: what is not there is None or empty."""

    name: str
    results: Results = field(default_factory=Results)
    plan: Plan | None = None
    analysis: AnalysisTold | None = None
    sensitivity: SensitivityTold | None = None
    bench: BenchTold | None = None
    metrics: tuple[Epoch, ...] = ()
    recipe: Texts = field(default_factory=dict)
    """Of a training, by dotted names."""
    environment: Environment = field(default_factory=Environment)

    @property
    def model(self) -> str:
        """What the network is called."""
        return self.results.model or self.recipe.get("model.name", "")

    @property
    def asked(self) -> Texts:
        """What the run was to do."""
        return self.results.asked or self.recipe


def read_run(folder: Path) -> Run:
    """Everything in a folder that a report is made of; a `FileError` if any of it is wrong."""
    if not folder.is_dir():
        raise FileError(f"{folder} is no folder of fpgm prune or fpgm train.")
    results = _read(folder / "results.json", lambda value: decode(Results, value))
    recipe = _read(folder / "recipe.json", lambda value: texts(value, apart=("digest",)))
    if results is None and recipe is None:
        raise FileError(f"{folder} holds no results of fpgm prune or fpgm train.")
    return Run(
        Path(os.path.realpath(folder)).name,
        results or Results(),
        _plan(folder / "plan.json"),
        _read(folder / "analysis.json", lambda value: decode(AnalysisTold, value)),
        _read(folder / "sensitivity.json", lambda value: decode(SensitivityTold, value)),
        _read(folder / "bench.json", lambda value: decode(BenchTold, value)),
        tuple(_epochs(folder / "metrics.jsonl")),
        recipe or {},
        _read(folder / "environment.json", _environment) or Environment(),
    )


def _text(file: Path) -> str | None:
    """What is in a file, None if there is none."""
    try:
        return text_of(file, LARGEST)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise FileError(f"{file} is too large for a report.") from error
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error


Made = TypeVar("Made")


def _read(file: Path, make: Callable[[Any], Made]) -> Made | None:
    """What `make` makes of the JSON in a file."""
    text = _text(file)
    if text is None:
        return None
    try:
        value = parsed(text)
    except ValueError as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    return _fit(file, make, value)


def _fit(file: Path, make: Callable[[Any], Made], value: Any) -> Made:
    try:
        return make(value)
    except UnfitError as error:
        raise FileError(f"{file} was not written by fpgm: {error}.") from error


def _plan(file: Path) -> Plan | None:
    text = _text(file)
    try:
        plan = None if text is None else Plan.from_json(text)
    except PlanError as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    if plan is not None and not _can_be_shown(plan):
        raise FileError(f"{file} cannot be read: some of its numbers cannot be meant.")
    return plan


def _can_be_shown(plan: Plan) -> bool:
    """Whether its numbers are counts and shares that can be reckoned with."""
    costs = (plan.macs_before, plan.macs_after, plan.params_before, plan.params_after)
    timed = () if plan.latency is None else astuple(plan.latency)[1:]
    return (
        all(0 <= cost < COUNTED for cost in costs)
        and all(0 <= group.kept <= group.units < COUNTED and group.units for group in plan.groups)
        and all(abs(own) < COUNTED and math.isfinite(own) for own in timed)
        and all(cut.size * cut.blocks < COUNTED for cut in plan.cuts)
        and all(isinstance(note, str) for note in plan.notes)
    )


def _environment(value: Any) -> Environment:
    """The command apart from the rest."""
    others = texts(value, apart=("command",))
    return Environment(decode(Environment, {"command": value.get("command") or []}).command, others)


def _epochs(file: Path) -> Iterator[Epoch]:
    """One object a line; one may be half-written, where training goes on or was killed."""
    for line in (_text(file) or "").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        except RecursionError as error:
            raise FileError(f"{file} cannot be read: {reason(error)}.") from error
        yield _fit(file, lambda told: decode(Epoch, told), value)
