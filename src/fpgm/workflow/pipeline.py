"""Prune, recover, evaluate and save: the functions behind `fpgm prune` and `fpgm recover`.

    run = run_pruning(model, example, PlanRequest(macs=0.5), recovery=RecoveryOptions(), data=data)
    save_pruning(run, Path("runs/small"), Origin("resnet20", weights, (1, 3, 32, 32)))

`run_recovery` and `save_recovery` continue from the written folder. If `torch.distributed` is
initialized, all ranks call the `run_…` functions, which divide the work; only rank 0 saves.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fpgm._version import __version__
from fpgm.errors import FileError, RequestError
from fpgm.models.registry import names_code
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.verification import Certificate
from fpgm.recovery.api import Method, Recovery, recover, recovery_of
from fpgm.recovery.sensitivity.api import sensitivity
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.report.analysis.api import analyze_planner
from fpgm.report.analysis.result import Analysis
from fpgm.utils.distributed import current_ranks, fails_together
from fpgm.utils.modules import tensors_sha256
from fpgm.utils.plain_json import to_json
from fpgm.utils.run_files import (
    ANALYSIS,
    BENCH,
    EXPORTED,
    FORMAT,
    REPORT,
    RESULTS,
    SENSITIVITY,
    SOLVED,
    RunResults,
)
from fpgm.utils.safe_read import read_json, read_text
from fpgm.utils.text import reason
from fpgm.workflow.api import check_prunes, compact_certified, make_plan
from fpgm.workflow.original_model import example_input
from fpgm.workflow.plan_request import PlanRequest
from fpgm.workflow.pruned_folder import (
    PrunedFolder,
    certificate_dict,
    costs_dict,
    weights_record,
    write_pruned,
)
from fpgm.workflow.step_timer import Steps, StepTimer

TEST_IMAGES = 2000
"""Test images that accuracy is measured on, by default."""


class LabelledData(Protocol):
    """Calibration batches, and labeled batches to measure accuracy."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and classes, the same in every iteration."""

    def count_correct(self, model: nn.Module, count: int) -> tuple[int, int]:
        """Count correct predictions and inputs among the first `count`; 0 if no classes."""


@dataclass(frozen=True)
class RecoveryOptions:
    """How accuracy is recovered; the options of `fpgm.recover`."""

    method: Method | None = "solve"
    """None: keep the weights and only distill."""
    images: int = 1024
    distil: float = 0.0

    @property
    def needs_data(self) -> bool:
        """Return whether real inputs are needed; otherwise noise is enough."""
        return self.method != "weights" or self.distil > 0


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: what is needed to build it again."""

    model: str
    """As on the command line: built in, torchvision:NAME, timm:NAME or file.py:factory."""
    weights: Path | None
    shape: Sequence[int]
    """Of the example input."""

    @property
    def untrained(self) -> bool | None:
        """Return whether the weights are random; None if the user's code may have loaded some."""
        return None if self.weights is None and names_code(self.model) else self.weights is None


@dataclass(frozen=True)
class AccuracyResult:
    """Fractions of test inputs that models classify correctly, by the model's name."""

    shares: Mapping[str, float]
    inputs: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of results.json."""
        if not self.shares:
            return {"accuracy": None}
        return {"accuracy": dict(self.shares), "test_images": self.inputs}


@dataclass(frozen=True)
class PruningRun:
    """The result of pruning a model."""

    original: nn.Module
    model: nn.Module
    """The compact model, recovered if that was requested."""
    plan: Plan
    certificate: Certificate
    """Of the compact model before recovery."""
    request: PlanRequest
    analysis: Analysis
    sensitivity: Sensitivity | None = None
    recovery: Recovery | None = None
    accuracy: AccuracyResult | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@fails_together
def run_pruning(
    model: nn.Module,
    example: Tensor,
    request: PlanRequest,
    *,
    recovery: RecoveryOptions | None = None,
    data: LabelledData | None = None,
    test: int = TEST_IMAGES,
    steps: Steps | None = None,
) -> PruningRun:
    """Plan, compact, verify, analyze the filters, recover and measure accuracy.

    Args:
        model: The network to prune; it stays as it is.
        example: An input of the model.
        request: The options of `fpgm.plan`.
        recovery: How to recover; None leaves the compact model as it is.
        data: For recovery, sensitivity and accuracy.
        test: How many test inputs accuracy is counted on.
        steps: Follows the steps, with their durations.
    """
    steps = steps or StepTimer()
    request = replace(request, progress=request.progress or steps.report_layer)
    measured = _sensitivity(model, example, request, data, steps)
    if measured is not None:
        request = replace(request, allocate=measured)
    # On one rank only: plans may depend on measured times.
    plan, certificate, analysis = current_ranks().on_first(
        lambda: _plan_and_verify(model, example, request, steps)
    )
    compacted = compact(model, plan)
    small, recovered = compacted, None
    if recovery is not None:
        with steps.step("recover"):
            small = _recover(model, plan, example, data, recovery, steps)
            recovered = recovery_of(small)
    accuracy = None
    if data is not None:
        with steps.step("count accuracy"):
            models = {"original": model, "compact": compacted}
            if recovered is not None:
                models["recovered"] = small
            accuracy = count_accuracy(models, data, test)
    return PruningRun(
        model, small, plan, certificate, request, analysis,
        measured, recovered, accuracy, dict(steps.seconds),
    )  # fmt: skip


def _plan_and_verify(
    model: nn.Module, example: Tensor, request: PlanRequest, steps: Steps
) -> tuple[Plan, Certificate, Analysis]:
    """Plan, verify the compact model, and analyze the original's filters."""
    with steps.step("trace and plan"):
        plan, planner = make_plan(model, example, request)
    check_prunes(plan)
    with steps.step("compact and verify"):
        pruned = compact_certified(planner, plan, request)
    with steps.step("analyze filters"):
        analysis = analyze_planner(planner, quick=True)
    return pruned.plan, pruned.certificate, analysis


def save_pruning(
    run: PruningRun,
    out: Path,
    origin: Origin,
    *,
    asked: Mapping[str, Any] | None = None,
    command: str = "",
    force: bool = False,
) -> RunResults:
    """Write a run to a folder, completely or not at all, and return the contents of results.json.

    Args:
        run: What `run_pruning` returned.
        out: The folder.
        origin: Where the model comes from.
        asked: Further settings to store, besides those of the plan.
        command: With which it can be done again.
        force: Replace an earlier run.
    """
    results: RunResults = {
        "format": FORMAT,
        "model": origin.model,
        "weights": weights_record(origin.weights),
        "untrained": origin.untrained,
        "original_sha256": tensors_sha256(run.original),
        "input": list(origin.shape),
        "asked": _drop_unset(run.request.to_dict() | dict(asked or {})),
        "achieved": costs_dict(run.plan),
        "certificate": certificate_dict(run.certificate),
    }
    _add_recovery(results, run.model, run.recovery, run.accuracy)
    _add_run(results, run.seconds, command)
    beside = {ANALYSIS: to_json(run.analysis.to_dict())}
    if run.sensitivity is not None:
        beside[SENSITIVITY] = run.sensitivity.to_json(indent=1)
    if current_ranks().is_first:
        write_pruned(out, run.model, run.plan, results, beside, force=force)
    return results


@dataclass(frozen=True)
class RecoveryRun:
    """The result of recovering a pruned folder."""

    folder: PrunedFolder
    model: nn.Module
    recovery: Recovery
    accuracy: AccuracyResult | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Tell whether the weights differ from those in the folder."""
        return tensors_sha256(self.model) != tensors_sha256(self.folder.small)


@fails_together
def run_recovery(
    folder: PrunedFolder,
    options: RecoveryOptions,
    *,
    data: LabelledData | None = None,
    test: int = TEST_IMAGES,
    steps: Steps | None = None,
) -> RecoveryRun:
    """Recover the compact model of a folder, starting from its weights.

    New weights are discarded unless they bring the outputs closer to the original's.

    Args:
        folder: What `open_pruned` read.
        options: How to recover.
        data: For recovery and accuracy.
        test: How many test inputs accuracy is counted on.
        steps: Follows the steps, with their durations.
    """
    steps = steps or StepTimer()
    example = example_input(folder.results["input"])
    with steps.step("recover"):
        small = _recover(
            folder.original,
            folder.plan,
            example,
            data,
            options,
            steps,
            start=folder.small,
            cache=folder.path / SOLVED if os.access(folder.path, os.W_OK) else None,
        )
    accuracy = None
    if data is not None:
        with steps.step("count accuracy"):
            models = {"original": folder.original, "compact": folder.plain}
            if folder.own_weights:
                models["before"] = folder.small
            accuracy = count_accuracy({**models, "recovered": small}, data, test)
    return RecoveryRun(folder, small, recovery_of(small), accuracy, dict(steps.seconds))


def save_recovery(
    run: RecoveryRun, out: Path | None, results: RunResults, *, force: bool = False
) -> None:
    """Write a recovered model to its folder or another, completely or not at all.

    Exports and the report in the run's own folder belong to the old weights, so they are removed.

    Args:
        run: What `run_recovery` returned.
        out: Another folder; None writes the run's own back.
        results: What `recovery_results` returned.
        force: Replace an earlier run in `out`.
    """
    if not current_ranks().is_first:
        return
    source = run.folder.path
    beside = _read_texts(source, (ANALYSIS, SENSITIVITY, BENCH))
    small, plan = run.model, run.folder.plan
    if out is None:
        write_pruned(source, small, plan, results, beside, check=_check_unchanged(run.folder))
    else:
        write_pruned(out, small, plan, results, beside, force=force)


def outdated_files(folder: Path) -> list[str]:
    """List the files in a folder that are of older weights once its model is recovered."""
    return [name for name in (REPORT, *EXPORTED) if (folder / name).exists()]


def recovery_results(
    run: RecoveryRun, *, asked: Mapping[str, Any] | None = None, command: str = ""
) -> RunResults:
    """Return results.json after a recovery, with its previous values as `earlier`.

    Args:
        run: What `run_recovery` returned.
        asked: Settings of the recovery to write down.
        command: With which it can be done again.
    """
    before = run.folder.results
    kept = ("command", "asked", "accuracy", "test_images", "seconds")
    earlier: dict[str, Any] = {key: value for key, value in before.items() if key in kept}
    results = before.copy()
    results.pop("row", None)
    results["earlier"] = [*before.get("earlier", []), earlier]
    results["asked"] = {**_without_recovery(before.get("asked", {})), **_drop_unset(asked or {})}
    _add_recovery(results, run.model, run.recovery, run.accuracy)
    _add_run(results, run.seconds, command)
    return results


@fails_together
def count_accuracy(
    models: Mapping[str, nn.Module], data: LabelledData, count: int
) -> AccuracyResult:
    """Measure the accuracy of models on test inputs; skip models that are not classifiers.

    Ranks divide the models among them.
    """
    ranks = current_ranks()
    own = [name for number, name in enumerate(models) if ranks.owns(number)]
    by_rank = ranks.gather({name: data.count_correct(models[name], count) for name in own})
    counts = {name: counted for one in by_rank for name, counted in one.items()}
    shares = {name: counts[name][0] / counts[name][1] for name in models if counts[name][1]}
    return AccuracyResult(shares, max((total for _, total in counts.values()), default=0))


def _sensitivity(
    model: nn.Module,
    example: Tensor,
    request: PlanRequest,
    data: LabelledData | None,
    steps: Steps,
) -> Sensitivity | None:
    """Measure the sensitivity for choosing rates, or return the given one."""
    if isinstance(request.allocate, Sensitivity):
        return request.allocate
    if request.allocate != "sensitivity" or data is None:
        return None
    with steps.step("measure sensitivity"):
        return sensitivity(
            model, example, data,
            rates=(), progress=request.progress,
            criterion=request.criterion, distance=request.distance, residual=request.residual,
            ignore=request.ignore, approximate=request.approximate,
        )  # fmt: skip


def _recover(
    model: nn.Module,
    plan: Plan,
    example: Tensor,
    data: LabelledData | None,
    options: RecoveryOptions,
    steps: Steps,
    start: nn.Module | None = None,
    cache: Path | None = None,
) -> nn.Module:
    """Recover a compact model.

    Args:
        model: The original model.
        plan: The plan.
        example: An example input, for methods that need no data.
        data: Inputs to solve and distill with; labels are not used.
        options: Method, number of images and duration.
        steps: Reports progress.
        start: A compact model whose weights to start from, instead of the original's.
        cache: Where solved layers are stored, to resume an interrupted recovery.
    """
    if data is None and options.needs_data:
        raise RequestError("This recovery method needs inputs: pass data.")
    return recover(
        model, plan, [example] if data is None else data,
        method=options.method, images=options.images, distil=options.distil, start=start,
        cache=cache,
        progress=steps.report_layer,
    )  # fmt: skip


def _add_recovery(
    results: RunResults,
    model: nn.Module,
    recovery: Recovery | None,
    accuracy: AccuracyResult | None,
) -> None:
    if recovery is not None:
        results["recovery"] = recovery.to_dict()
        results["small_sha256"] = tensors_sha256(model)
    results.pop("accuracy", None)
    results.pop("test_images", None)
    if accuracy is not None:
        results.update(cast(RunResults, accuracy.to_dict()))


def _add_run(results: RunResults, seconds: Mapping[str, float], command: str) -> None:
    results["versions"] = {
        "fpgm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    results["seconds"] = dict(seconds)
    results["command"] = command


def _drop_unset(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out options that were not set."""
    return {name: value for name, value in asked.items() if value not in (None, {}, [])}


_RECOVERY_OPTIONS = ("recover", "data", "images", "test", "distil")


def _without_recovery(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in _RECOVERY_OPTIONS}


def _read_texts(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Read the files with these names that exist."""
    texts = {name: _read_text(folder / name) for name in names}
    return {name: text for name, text in texts.items() if text is not None}


def _read_text(file: Path) -> str | None:
    """Read a file; None if there is none."""
    try:
        return read_text(file).removesuffix("\n")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error


def _check_unchanged(folder: PrunedFolder) -> Callable[[], None]:
    """Return a check that nobody has replaced a folder since it was read."""

    def check() -> None:
        if read_json(folder.path / RESULTS) != folder.results:
            raise FileError(f"{folder.path} was changed by another process: recover it again.")

    return check
