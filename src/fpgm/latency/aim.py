"""Plans for a share of measured time: choose by prediction, build, measure, aim again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from fpgm.budget import Budget, Rounder
from fpgm.compact import compact
from fpgm.coupling import Structure
from fpgm.errors import RequestError
from fpgm.examples import Example
from fpgm.latency.backends import Backend, backend_of
from fpgm.latency.layers import called_layers
from fpgm.latency.predict import Predictor
from fpgm.latency.table import Table
from fpgm.latency.timing import ratio, side_by_side
from fpgm.plan import Latency, Plan
from fpgm.progress import Progress

AIMS = 5
"""Plans that are built and measured at most."""
NEAR = 0.02
"""A plan whose time is off by this share of what was asked is good enough."""
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
        original = copy.deepcopy(model).eval()  # timing is not to be noticed
        self.loaded = where.backend.load(original, example, where.threads)
        self.seconds = side_by_side([self.loaded.run], SECONDS)[0].median
        self._called = called_layers(model, example)
        self._table = Table(where.backend, where.threads)

    def predictor(self, structure: Structure) -> Predictor:
        """Seconds as a formula of how much of every pool stays."""
        return Predictor(
            structure, self._called, self._table, self.seconds, self.rounder, self.progress
        )

    def share_saved(self, small: nn.Module) -> tuple[float, float, float]:
        """By which share a smaller model is faster, turn by turn; and seconds of both by that."""
        loaded = self.where.backend.load(small.eval(), self.example, self.where.threads)
        mine, other = side_by_side([self.loaded.run, loaded.run], SECONDS)
        left = 1 / ratio(mine, other)
        return 1 - left, mine.median, mine.median * left


def reach(clocked: Clocked, budget: Budget, draw: Callable[[Budget], tuple[Plan, float]]) -> Plan:
    """The plan whose measured time comes nearest to what is asked.

    `draw` gives a plan for a budget and the seconds predicted for it. Where prediction and
    measurement part, the next plan asks for what the measurements so far say would come out right.
    """
    asked = budget.latency
    assert asked is not None
    aim = asked
    seen = {1.0: 1.0}
    best: Plan | None = None
    for number in range(AIMS):
        if clocked.progress is not None:
            clocked.progress("measuring a plan", number, AIMS)
        try:
            made, predicted = draw(replace(budget, latency=aim))
        except RequestError:  # what would be needed cannot be reached
            if best is None:
                raise
            break
        saved, before, after = clocked.share_saved(compact(clocked.model, made))
        found = Latency(
            backend=clocked.where.backend.name,
            threads=clocked.where.threads,
            asked=asked,
            predicted=1 - predicted / clocked.seconds,
            measured=saved,
            seconds_before=before,
            seconds_after=after,
        )
        timed = replace(made, asked={**made.asked, "latency": asked}, latency=found)
        if made.cuts and (best is None or _off(timed) < _off(best)):
            best = timed
        if best is timed and _off(timed) <= NEAR:
            break
        seen[1 - saved] = 1 - aim
        aim = 1 - _between(seen, 1 - asked)
    if best is None:
        raise RequestError(
            f"latency={asked:g}: no plan that removes anything could be told from the original by "
            "its time. Ask for more, or try again on a machine with less to do."
        )
    assert best.latency is not None
    if _off(best) > NEAR:
        note = (
            f"The nearest plan that was found takes {best.latency.measured:.1%} less time, not "
            f"{asked:.1%}."
        )
        best = replace(best, notes=(*best.notes, note))
    return best


def _between(seen: Mapping[float, float], wanted: float) -> float:
    """What to ask for so that `wanted` is left, from what was left and had been asked for.

    Straight lines between the logarithms: all of it left is known to be all of it asked for.

    >>> round(_between({1.0: 1.0, 0.25: 0.5}, 0.5), 3)
    0.707
    """
    left = np.log(np.maximum(sorted(seen), 1e-3))
    given = np.log(np.maximum([seen[key] for key in sorted(seen)], 1e-3))
    goal = np.log(wanted)
    low = int(np.clip(np.searchsorted(left, goal), 1, len(left) - 1)) - 1
    run = left[low + 1] - left[low]
    slope = (given[low + 1] - given[low]) / run if run > 0 else 1.0
    found = np.exp(given[low] + max(slope, 0.0) * (goal - left[low]))
    return float(np.clip(found, 0.01, 1.0))


def _off(made: Plan) -> float:
    """How far a plan's time is from what was asked, as a share of it."""
    told = made.latency
    assert told is not None
    return abs((1 - told.measured) / (1 - told.asked) - 1)
