"""Plans for a share of measured time: choose by prediction, build, measure, aim again.

A plan is drawn by interpolated times, made, and foretold once more by the times of its own layers;
runtimes like some widths much better than their neighbours, which only the second tells. What it
promises is then held against a measurement of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from fpgm.errors import RequestError
from fpgm.latency.backends import Backend, backend_of, running
from fpgm.latency.lookup_table import Table
from fpgm.latency.predictor import Predictor, share_left
from fpgm.planning.budget import Budget, Rounder
from fpgm.planning.planner import Planner
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Latency, Plan
from fpgm.tracing.cost_model import Floats
from fpgm.tracing.grouping import Structure
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example
from fpgm.utils.machine_load import Neighbours
from fpgm.utils.progress import Progress
from fpgm.utils.timing import ratio, side_by_side

AIMS = 5
"""Plans that are built and measured at most."""
NEAR = 0.02
"""A plan whose time is off by this share of what was asked is good enough."""
DRAFTS = 6
"""Plans that are foretold, at most, before one is measured."""
SECONDS = 3.0
"""Time given to one comparison of two models."""


@dataclass(frozen=True)
class Where:
    """What a model's time depends on besides the model."""

    backend: Backend
    threads: int

    @classmethod
    def of(cls, backend: str, threads: int | None) -> Where:
        """A runtime by name and its threads, by default as many as torch uses."""
        if threads is None:
            threads = torch.get_num_threads()
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise RequestError(f"threads is {threads!r}: give a whole number from 1 up.")
        return cls(backend_of(backend), threads)


class Clocked:
    """A model in a runtime: how long it takes, and how long it would take with less of it."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        where: Where,
        rounder: Rounder,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.example, self.where, self.rounder = model, example, where, rounder
        self.progress = progress
        if any(p.is_cuda for p in model.parameters()) and not where.backend.name.startswith("cuda"):
            raise RequestError(
                f"The model is on a CUDA device, and {where.backend.name} is timed on the "
                "processor: move the model there, or give backend='cuda'."
            )
        original = copy_model(model).eval()  # timing is not to be noticed
        with running(where.backend):
            self.loaded = where.backend.load(original, example, where.threads)
            self.seconds = side_by_side([self.loaded.run], SECONDS)[0].median
        self._called = called_layers(model, example)
        self._table = Table(where.backend, where.threads)

    def predictor(self, structure: Structure) -> Predictor:
        """Seconds as a formula of how much of every pool stays."""
        return Predictor(
            structure, self._called, self._table, self.seconds, self.rounder, self.progress
        )

    def foretell(self, small: nn.Module, plan: Plan) -> float:
        """By which share a smaller model should be faster: its layers timed one by one."""
        called = called_layers(small, self.example)
        macs = plan.macs_before, plan.macs_after
        left = share_left(self._called, called, self._table, self.seconds, macs)
        self._table.save()
        return 1 - left

    def share_saved(self, small: nn.Module) -> tuple[float, float, float]:
        """By which share a smaller model is faster, turn by turn; and seconds of both by that."""
        with running(self.where.backend):
            loaded = self.where.backend.load(small.eval(), self.example, self.where.threads)
            mine, other = side_by_side([self.loaded.run, loaded.run], SECONDS)
        left = 1 / ratio(mine, other)
        return 1 - left, mine.median, mine.median * left


@dataclass(frozen=True)
class _Draft:
    """A plan, the model it makes, and the share of the time that its layers promise to save."""

    plan: Plan
    small: nn.Module
    saved: float


def plan_for_latency(planner: Planner, where: Where, progress: Progress | None = None) -> Plan:
    """Build the plan that saves as much of the measured time as the planner's budget asks for."""
    if not planner.budget.latency:
        raise RequestError(f"latency is {planner.budget.latency}: give a share above 0.")
    load, asked = Neighbours(), planner.budget
    clocked = Clocked(planner.model, planner.examples[0], where, planner.rounder, progress)
    planner.latency_of = clocked.predictor

    def build(budget: Budget) -> Plan:
        planner.budget = budget
        return planner.draw().plan

    try:
        plan = reach(clocked, asked, build)
    except RequestError as error:
        if (crowd := load.crowd(where.threads)) is None:
            raise
        raise RequestError(f"{error} But {crowd}: try again when they are idle.") from error
    finally:
        planner.budget = asked
    if (crowd := load.crowd(where.threads)) is not None:
        note = f"While times were measured {crowd}: they may be wrong."
        plan = replace(plan, notes=(*plan.notes, note))
    return plan


def reach(clocked: Clocked, budget: Budget, draw: Callable[[Budget], Plan]) -> Plan:
    """The plan whose measured time comes nearest to what is asked.

    `draw` gives a plan for a budget. Where prediction and measurement part, the next plan is to
    promise what the measurements so far say would come out right.
    """
    asked = budget.latency
    assert asked is not None
    wanted = asked
    known = _Known()  # what was left by measurement, by what plans promised to leave
    measured: list[Plan] = []
    for number in range(AIMS):
        if clocked.progress is not None:
            clocked.progress("measuring a plan", number, AIMS)
        try:
            draft = _draft(clocked, budget, wanted, draw)
        except RequestError:  # what would be needed cannot be reached
            if not measured:
                raise
            break
        if any(draft.plan.cuts == made.cuts for made in measured):
            break
        saved, before, after = clocked.share_saved(draft.small)
        found = Latency(
            backend=clocked.where.backend.name,
            threads=clocked.where.threads,
            asked=asked,
            predicted=1 - known.left(1 - draft.saved),
            measured=saved,
            seconds_before=before,
            seconds_after=after,
        )
        told = {**draft.plan.asked, "latency": asked}
        measured.append(replace(draft.plan, asked=told, latency=found))
        if _off(saved, asked) <= NEAR:
            break
        known.add(1 - draft.saved, 1 - saved)
        wanted = 1 - known.aim(1 - asked)
    return _nearest([made for made in measured if made.cuts], asked)


def _nearest(measured: Sequence[Plan], asked: float) -> Plan:
    """The plan that comes nearest, with a note if that is not near."""
    best = min(measured, key=lambda made: _off(_saved(made), asked), default=None)
    if best is None:
        raise RequestError(
            f"latency={asked:g}: no plan that removes anything could be told from the original by "
            "its time. Ask for more, or try again on a machine with less to do."
        )
    if _off(_saved(best), asked) > NEAR:
        note = (
            f"The nearest plan that was found takes {_saved(best):.1%} less time, not {asked:.1%}."
        )
        best = replace(best, notes=(*best.notes, note))
    return best


def _draft(
    clocked: Clocked, budget: Budget, wanted: float, draw: Callable[[Budget], Plan]
) -> _Draft:
    """A plan whose own layers promise what is wanted, as nearly as a few tries bring it."""
    aim = wanted
    known = _Known()  # what plans promised to leave, by what was aimed at
    best: _Draft | None = None
    for _ in range(DRAFTS):
        try:
            made = draw(replace(budget, latency=aim))
        except RequestError:
            if best is None:
                raise
            break
        small = compact(clocked.model, made)
        draft = _Draft(made, small, clocked.foretell(small, made))
        if best is None or _off(draft.saved, wanted) < _off(best.saved, wanted):
            best = draft
        if _off(best.saved, wanted) <= NEAR / 2:
            break
        known.add(1 - aim, 1 - draft.saved)
        aim = 1 - known.aim(1 - wanted)
    assert best is not None
    return best


class _Known:
    """What was left where so much was aimed at: points, and a curve through them.

    Who aims at less cannot be left with more, except by chance: where measurements contradict that,
    they count as alike. Between them lie straight lines; beyond the lowest, the same share is off.

    >>> known = _Known()
    >>> known.add(0.5, 0.55)
    >>> round(known.left(0.4), 3), round(known.aim(0.5), 3)
    (0.44, 0.455)
    >>> known.add(0.45, 0.57)
    >>> round(known.left(0.45), 3), round(known.aim(0.5), 3)
    (0.56, 0.402)
    """

    def __init__(self) -> None:
        self._points = {1.0: 1.0}

    def add(self, aim: float, left: float) -> None:
        self._points[aim] = left

    def left(self, aim: float) -> float:
        """What is to be expected at an aim."""
        aims, fitted = self._curve()
        if aim <= aims[0]:
            return float(aim * fitted[0] / aims[0])
        return float(np.interp(aim, aims, fitted))

    def aim(self, left: float) -> float:
        """What to aim at so that so much is left."""
        aims, fitted = self._curve()
        if left <= fitted[0]:
            found = float(aims[0] * left / max(fitted[0], 1e-3))
        else:
            found = float(np.interp(left, fitted, aims))
        return min(max(found, 0.01), 1.0)

    def _curve(self) -> tuple[Floats, Floats]:
        aims = np.array(sorted(self._points))
        left = np.array([self._points[aim] for aim in aims])
        never_less = np.maximum.accumulate(left)
        never_more = np.minimum.accumulate(left[::-1])[::-1]
        return aims, (never_less + never_more) / 2


def _saved(made: Plan) -> float:
    """Share of the time that a measured plan saves."""
    assert made.latency is not None
    return made.latency.measured


def _off(saved: float, asked: float) -> float:
    """How far the time that is left is from what was asked, as a share of it."""
    return abs((1 - saved) / (1 - asked) - 1)
