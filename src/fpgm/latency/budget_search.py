"""Find the plan that saves a given fraction of measured time: predict, build, measure, correct.

A plan is chosen by interpolated layer times, built, and predicted again from the times of its own
layers: runtimes are much faster at some widths than at similar ones, which interpolation misses.
Then the compact model is measured, and the next target is corrected accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from fpgm.errors import RequestError
from fpgm.latency.backends import Backend, get_backend, runtime_errors
from fpgm.latency.lookup_table import LatencyTable
from fpgm.latency.predictor import Predictor, predict_ratio
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner
from fpgm.planning.width_rounding import Rounder
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Latency, Plan
from fpgm.tracing.cost_model import Floats
from fpgm.tracing.grouping import Structure
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example
from fpgm.utils.machine_load import MachineLoad
from fpgm.utils.progress import Progress
from fpgm.utils.timing import time_interleaved, time_ratio

MAX_MEASURED = 5
"""Plans to build and measure at most."""
TOLERANCE = 0.02
"""Relative difference to the requested time that is good enough."""
MAX_PREDICTED = 6
"""Plans to predict at most before one is measured."""
SECONDS = 3.0
"""Time to spend on one comparison of two models."""


@dataclass(frozen=True)
class BackendConfig:
    """A runtime and its number of threads."""

    backend: Backend
    threads: int

    @classmethod
    def of(cls, backend: str, threads: int | None) -> BackendConfig:
        """Look up a runtime by name; by default it has as many threads as torch uses."""
        if threads is None:
            threads = torch.get_num_threads()
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise RequestError(f"threads is {threads!r}: give an integer of at least 1.")
        return cls(get_backend(backend), threads)


class TimedModel:
    """A model in a runtime: its measured time, and predictions for compact versions of it."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        config: BackendConfig,
        rounder: Rounder,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.example, self.config, self.rounder = model, example, config, rounder
        self.progress = progress
        backend = config.backend
        if any(p.is_cuda for p in model.parameters()) and not backend.name.startswith("cuda"):
            raise RequestError(
                f"The model is on a CUDA device, but {backend.name} is timed on the CPU: move the "
                "model to the CPU, or pass backend='cuda'."
            )
        original = copy_model(model).eval()  # timing has no side effects on the model
        with runtime_errors(backend):
            self.loaded = backend.load(original, example, config.threads)
            self.seconds = time_interleaved([self.loaded.run], SECONDS)[0].median
        self._called = called_layers(model, example)
        self._table = LatencyTable(backend, config.threads)

    def predictor(self, structure: Structure) -> Predictor:
        """Build a predictor of seconds from the kept fraction of every group."""
        return Predictor(
            structure, self._called, self._table, self.seconds, self.rounder, self.progress
        )

    def predict_saving(self, small: nn.Module, plan: Plan) -> float:
        """Predict the fraction of time that a compact model saves, by timing each of its layers."""
        called = called_layers(small, self.example)
        macs = plan.macs_before, plan.macs_after
        remaining = predict_ratio(self._called, called, self._table, self.seconds, macs)
        self._table.save()
        return 1 - remaining

    def measure_saving(self, small: nn.Module) -> tuple[float, float, float]:
        """Measure the fraction of time that a compact model saves, and the seconds of both."""
        backend = self.config.backend
        with runtime_errors(backend):
            loaded = backend.load(small.eval(), self.example, self.config.threads)
            original, compacted = time_interleaved([self.loaded.run, loaded.run], SECONDS)
        remaining = 1 / time_ratio(original, compacted)
        return 1 - remaining, original.median, original.median * remaining


@dataclass(frozen=True)
class _TimedPlan:
    """A plan, its compact model, and the predicted saving."""

    plan: Plan
    small: nn.Module
    saving: float


def plan_for_latency(
    planner: Planner, config: BackendConfig, progress: Progress | None = None
) -> Plan:
    """Build the plan that saves as much of the measured time as the planner's budget requests."""
    if not planner.budget.latency:
        raise RequestError(f"latency is {planner.budget.latency}: give a fraction above 0.")
    load, requested = MachineLoad(), planner.budget
    timed = TimedModel(planner.model, planner.examples[0], config, planner.rounder, progress)
    planner.latency_of = timed.predictor

    def build(budget: Budget) -> Plan:
        planner.budget = budget
        return planner.build_plan().plan

    try:
        plan = reach_budget(timed, requested, build)
    except RequestError as error:
        if (other_load := load.describe_contention(config.threads)) is None:
            raise
        raise RequestError(
            f"{error} But {other_load}: try again when the machine is idle."
        ) from error
    finally:
        planner.budget = requested
    if (other_load := load.describe_contention(config.threads)) is not None:
        note = f"While times were measured, {other_load}: they may be wrong."
        latency = plan.latency and replace(plan.latency, crowd=other_load)
        plan = replace(plan, notes=(*plan.notes, note), latency=latency)
    return plan


def reach_budget(timed: TimedModel, budget: Budget, build_plan: Callable[[Budget], Plan]) -> Plan:
    """Search for the plan whose measured time is closest to the budget.

    If prediction and measurement differ, the target of the next plan is the prediction that, by the
    measurements so far, corresponds to the requested saving.

    Args:
        timed: the original model.
        budget: with the requested saving in `latency`.
        build_plan: builds a plan for a budget.
    """
    requested = budget.latency
    assert requested is not None
    target = requested
    calibration = _SavingCurve()  # from predicted to measured remaining time
    measured: list[Plan] = []
    for number in range(MAX_MEASURED):
        if timed.progress is not None:
            timed.progress("measuring a plan", number, MAX_MEASURED)
        try:
            candidate = _build_candidate(timed, budget, target, build_plan)
        except RequestError:  # the target cannot be reached
            if not measured:
                raise
            break
        if any(candidate.plan.cuts == plan.cuts for plan in measured):
            break
        saving, before, after = timed.measure_saving(candidate.small)
        latency = Latency(
            backend=timed.config.backend.name,
            threads=timed.config.threads,
            asked=requested,
            predicted=1 - calibration.expected_result(1 - candidate.saving),
            measured=saving,
            seconds_before=before,
            seconds_after=after,
        )
        options = {**candidate.plan.asked, "latency": requested}
        measured.append(replace(candidate.plan, asked=options, latency=latency))
        if _relative_error(saving, requested) <= TOLERANCE:
            break
        calibration.add(1 - candidate.saving, 1 - saving)
        target = 1 - calibration.target(1 - requested)
    return _choose_nearest([plan for plan in measured if plan.cuts], requested)


def _choose_nearest(measured: Sequence[Plan], requested: float) -> Plan:
    """Choose the plan nearest to the request, and add a note if it misses the tolerance."""
    best = min(
        measured,
        key=lambda plan: _relative_error(_measured_saving(plan), requested),
        default=None,
    )
    if best is None:
        raise RequestError(
            f"latency={requested:g}: no plan that removes anything differs measurably in time from "
            "the original. Request a larger saving, or try again on an idle machine."
        )
    saving = _measured_saving(best)
    if _relative_error(saving, requested) > TOLERANCE:
        note = f"The nearest plan saves {saving:.1%} of the time, not {requested:.1%}."
        best = replace(best, notes=(*best.notes, note))
    return best


def _build_candidate(
    timed: TimedModel, budget: Budget, target: float, build_plan: Callable[[Budget], Plan]
) -> _TimedPlan:
    """Build the plan whose own layers' times predict a saving nearest to the target."""
    setting = target
    calibration = _SavingCurve()  # from the planner's setting to predicted remaining time
    best: _TimedPlan | None = None
    for _ in range(MAX_PREDICTED):
        try:
            plan = build_plan(replace(budget, latency=setting))
        except RequestError:
            if best is None:
                raise
            break
        small = compact(timed.model, plan)
        candidate = _TimedPlan(plan, small, timed.predict_saving(small, plan))
        if best is None or _relative_error(candidate.saving, target) < _relative_error(
            best.saving, target
        ):
            best = candidate
        if _relative_error(best.saving, target) <= TOLERANCE / 2:
            break
        calibration.add(1 - setting, 1 - candidate.saving)
        setting = 1 - calibration.target(1 - target)
    assert best is not None
    return best


class _SavingCurve:
    """A monotone curve through points (target, result), both fractions of the time that remains.

    A lower target cannot give a higher result, except by noise: points that contradict this are
    averaged. The curve is linear between points, and proportional below the lowest.

    >>> calibration = _SavingCurve()
    >>> calibration.add(0.5, 0.55)
    >>> round(calibration.expected_result(0.4), 3), round(calibration.target(0.5), 3)
    (0.44, 0.455)
    >>> calibration.add(0.45, 0.57)
    >>> round(calibration.expected_result(0.45), 3), round(calibration.target(0.5), 3)
    (0.56, 0.402)
    """

    def __init__(self) -> None:
        self._points = {1.0: 1.0}

    def add(self, target: float, result: float) -> None:
        self._points[target] = result

    def expected_result(self, target: float) -> float:
        """Return the result to expect for a target."""
        targets, results = self._curve()
        if target <= targets[0]:
            return float(target * results[0] / targets[0])
        return float(np.interp(target, targets, results))

    def target(self, result: float) -> float:
        """Return the target at which to expect a result."""
        targets, results = self._curve()
        if result <= results[0]:
            target = float(targets[0] * result / max(results[0], 1e-3))
        else:
            target = float(np.interp(result, results, targets))
        return min(max(target, 0.01), 1.0)

    def _curve(self) -> tuple[Floats, Floats]:
        targets = np.array(sorted(self._points))
        results = np.array([self._points[target] for target in targets])
        never_less = np.maximum.accumulate(results)
        never_more = np.minimum.accumulate(results[::-1])[::-1]
        return targets, (never_less + never_more) / 2


def _measured_saving(plan: Plan) -> float:
    """Return the fraction of time that a measured plan saves."""
    assert plan.latency is not None
    return plan.latency.measured


def _relative_error(saving: float, requested: float) -> float:
    """Compute how far the remaining time is from the requested one, relative to it."""
    return abs((1 - saving) / (1 - requested) - 1)
