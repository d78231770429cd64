"""What a folder of results holds, read as JSON and nothing else: no model is built for a report."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fpgm.errors import FileError, PlanError
from fpgm.plan import Plan
from fpgm.wording import reason

LARGEST = 64 * 2**20
"""Bytes of a file that are still read."""


@dataclass(frozen=True)
class Run:
    """One run of `fpgm prune` or `fpgm train`: what is not there is None or empty."""

    name: str
    results: dict[str, Any]
    plan: Plan | None = None
    analysis: dict[str, Any] | None = None
    sensitivity: dict[str, Any] | None = None
    bench: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    recipe: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None


def read_run(folder: Path) -> Run:
    """Everything in a folder that a report is made of."""
    if not folder.is_dir():
        raise FileError(f"{folder} is no folder of fpgm prune or fpgm train.")
    results = _object(folder / "results.json")
    metrics = _lines(folder / "metrics.jsonl")
    recipe = _object(folder / "recipe.json")
    if results is None and recipe is None:
        raise FileError(f"{folder} holds no results of fpgm prune or fpgm train.")
    text = _text(folder / "plan.json")
    try:
        plan = None if text is None else Plan.from_json(text)
    except PlanError as error:
        raise FileError(f"{folder / 'plan.json'} cannot be read: {error}") from error
    return Run(
        folder.resolve().name,
        results or {},
        plan,
        _object(folder / "analysis.json"),
        _object(folder / "sensitivity.json"),
        _object(folder / "bench.json"),
        metrics,
        recipe,
        _object(folder / "environment.json"),
    )


def _text(file: Path) -> str | None:
    """What is in a file, None if there is none."""
    try:
        if file.stat().st_size > LARGEST:
            raise FileError(f"{file} is too large for a report.")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error


def _object(file: Path) -> dict[str, Any] | None:
    text = _text(file)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    if not isinstance(found, dict):
        raise FileError(f"{file} was not written by fpgm.")
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    """One object a line; the last may be half-written while training goes on."""
    found = []
    for line in (_text(file) or "").splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            break
        if isinstance(told, dict):
            found.append(told)
    return found
