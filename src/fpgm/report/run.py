"""Read a run folder of `fpgm prune` or `fpgm train` for a report.

Only JSON is read: no model is built and no checkpoint is opened.
"""

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
    AnalysisRecord,
    BenchRecord,
    EnvironmentRecord,
    EpochRecord,
    ResultsRecord,
    SensitivityRecord,
    StringMap,
    decode,
    flatten_settings,
)
from fpgm.utils.run_files import (
    ANALYSIS,
    BENCH,
    ENVIRONMENT,
    METRICS,
    PLAN,
    RECIPE,
    RESULTS,
    SENSITIVITY,
)
from fpgm.utils.safe_read import parse_json, read_text
from fpgm.utils.text import reason
from fpgm.utils.typed_json import FieldTypeError

MAX_FILE_BYTES = 64 * 2**20
"""Larger files are refused."""
MAX_COUNT = 2**63
"""A plan with larger counts of MACs, parameters or units is refused."""


@dataclass(frozen=True)
class Run:
    """One run of `fpgm prune` or `fpgm train`; the values of missing files are None or empty."""

    name: str
    results: ResultsRecord = field(default_factory=ResultsRecord)
    plan: Plan | None = None
    analysis: AnalysisRecord | None = None
    sensitivity: SensitivityRecord | None = None
    bench: BenchRecord | None = None
    metrics: tuple[EpochRecord, ...] = ()
    recipe: StringMap = field(default_factory=dict)
    """Settings of a training run, by dotted names."""
    environment: EnvironmentRecord = field(default_factory=EnvironmentRecord)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.results.model or self.recipe.get("model.name", "")

    @property
    def settings(self) -> StringMap:
        """The options that the run was started with."""
        return self.results.asked or self.recipe


def read_run(folder: Path) -> Run:
    """Read all files of a run folder that a report uses; raise `FileError` if one is invalid."""
    if not folder.is_dir():
        raise FileError(f"{folder} is not a run folder of fpgm prune or fpgm train.")
    results = _read_json(folder / RESULTS, lambda value: decode(ResultsRecord, value))
    recipe = _read_json(folder / RECIPE, lambda value: flatten_settings(value, exclude=("digest",)))
    if results is None and recipe is None:
        raise FileError(
            f"{folder} has neither results.json nor recipe.json: give a folder that fpgm prune or "
            "fpgm train has written."
        )
    return Run(
        Path(os.path.realpath(folder)).name,
        results or ResultsRecord(),
        _read_plan(folder / PLAN),
        _read_json(folder / ANALYSIS, lambda value: decode(AnalysisRecord, value)),
        _read_json(folder / SENSITIVITY, lambda value: decode(SensitivityRecord, value)),
        _read_json(folder / BENCH, lambda value: decode(BenchRecord, value)),
        tuple(_read_epochs(folder / METRICS)),
        recipe or {},
        _read_json(folder / ENVIRONMENT, _decode_environment) or EnvironmentRecord(),
    )


def _read_text(file: Path) -> str | None:
    """Read a file; return None if it does not exist."""
    try:
        return read_text(file, MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise FileError(f"{file} is larger than {MAX_FILE_BYTES:,} bytes.") from error
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error


ValueT = TypeVar("ValueT")


def _read_json(file: Path, convert: Callable[[Any], ValueT]) -> ValueT | None:
    """Read JSON and pass it to `convert`; return None if the file does not exist."""
    text = _read_text(file)
    if text is None:
        return None
    try:
        value = parse_json(text)
    except ValueError as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    return _convert(file, convert, value)


def _convert(file: Path, convert: Callable[[Any], ValueT], value: Any) -> ValueT:
    try:
        return convert(value)
    except FieldTypeError as error:
        raise FileError(f"{file} is not a valid fpgm file: {error}.") from error


def _read_plan(file: Path) -> Plan | None:
    text = _read_text(file)
    try:
        plan = None if text is None else Plan.from_json(text)
    except PlanError as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    if plan is not None and not _is_plausible(plan):
        raise FileError(f"{file} is not a valid plan: some of its numbers are out of range.")
    return plan


def _is_plausible(plan: Plan) -> bool:
    """Check that all counts of a plan are in a range that can be displayed."""
    costs = (plan.macs_before, plan.macs_after, plan.params_before, plan.params_after)
    latency_values = () if plan.latency is None else astuple(plan.latency)[1:-1]
    return (
        all(0 <= value < MAX_COUNT for value in costs)
        and all(0 <= group.kept <= group.units < MAX_COUNT and group.units for group in plan.groups)
        and all(abs(value) < MAX_COUNT and math.isfinite(value) for value in latency_values)
        and all(cut.size * cut.blocks < MAX_COUNT for cut in plan.cuts)
        and all(isinstance(note, str) for note in plan.notes)
    )


def _decode_environment(value: Any) -> EnvironmentRecord:
    """Separate the command line from the other entries of `environment.json`."""
    others = flatten_settings(value, exclude=("command",))
    return EnvironmentRecord(
        decode(EnvironmentRecord, {"command": value.get("command") or []}).command, others
    )


def _read_epochs(file: Path) -> Iterator[EpochRecord]:
    """Read one JSON object per line; skip a line that a running or killed training left partial."""
    for line in (_read_text(file) or "").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        except RecursionError as error:
            raise FileError(f"{file} cannot be read: {reason(error)}.") from error
        yield _convert(file, lambda item: decode(EpochRecord, item), value)
