"""Measure the sensitivity of all groups, and save each result to a cache file on the way.

Output errors are estimated for all groups from one set of statistics, then corrected by trials;
accuracy is measured by trials only. Ranks divide the inputs, and the groups where all of them have
the same inputs; only rank 0 reads and writes the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fpgm.errors import FileError, ModelError
from fpgm.planning.planner import Planner
from fpgm.recovery.sensitivity.error_curves import Floats, error_curve
from fpgm.recovery.sensitivity.probes import ModelStatistics, collect_statistics
from fpgm.recovery.sensitivity.result import GroupSensitivity, Sensitivity
from fpgm.recovery.sensitivity.trials import Trials, count_compared
from fpgm.tracing.grouping import ChannelGroup, Structure
from fpgm.utils.atomic_io import explain_write_errors, write_text
from fpgm.utils.calibration_data import Inputs, explain_forward_errors, move_batches, read_inputs
from fpgm.utils.distributed import current_ranks, fails_together
from fpgm.utils.modules import tensors_sha256
from fpgm.utils.preserve_state import preserve_state
from fpgm.utils.progress import Progress

IMAGES = 512
"""Inputs to measure sensitivity on."""

TRIAL_RATES = (0.3, 0.6)
"""Pruning rates at which estimated errors are compared with measured ones."""


def correct_curve(curve: Floats, error: Callable[[int], float | None]) -> Floats:
    """Scale an estimated error curve so that it passes through measured errors.

    Probes treat the errors of all positions as independent. Those of nearby positions are similar,
    and do not cancel out if a later layer averages over positions.

    Args:
        curve: estimated errors for 0, 1, … removed units.
        error: measures the error for a number of removed units; None if it cannot.
    """
    units = len(curve) - 1
    counts = sorted({round(rate * units) for rate in TRIAL_RATES} - {0, units})
    errors = {count: error(count) for count in counts}
    measured = {c: e for c, e in errors.items() if e is not None and 0 < e < math.inf}
    if not measured:
        return curve
    places = np.arange(units + 1)
    if any(curve[count] <= 0 for count in measured):  # nothing to scale: interpolate instead
        last = max(measured)
        line = np.interp(places, [0, *measured], [0.0, *measured.values()])
        return np.maximum.accumulate(np.where(places > last, measured[last] / last * places, line))
    ratios = [math.log(e / curve[c]) for c, e in measured.items()]
    return np.maximum.accumulate(curve * np.exp(np.interp(places, list(measured), ratios)))


@fails_together
def measure_sensitivity(
    planner: Planner,
    loader: Iterable[Any],
    images: int = IMAGES,
    progress: Progress | None = None,
    *,
    rates: Sequence[float] = (),
    cache: Path | None = None,
    trials: bool = True,
) -> Sensitivity:
    """Measure the output error that removing each group's units causes, in a planner's order.

    Args:
        planner: Selects the units of each group and knows the model.
        loader: Batches, as for `fpgm.sensitivity`.
        images: Inputs to use.
        progress: Reports progress.
        rates: Fractions of each group at which accuracy is measured.
        cache: A JSON file to resume from, written after every group.
        trials: Correct the estimate by the measured output error of trial prunings.
    """
    ranks = current_ranks()
    inputs = read_inputs(move_batches(planner.model, loader), images, ranks)
    try:
        with preserve_state(planner.model), explain_forward_errors(planner.model, inputs):
            planner.model.eval()
            run = SensitivityRun(
                planner.model,
                planner.structure,
                planner.order,
                planner.score_key(),
                rates,
                cache,
                progress,
                trials,
            )
            if ranks.size > 1:
                ranks.check_same(run.common(inputs))
            result = run.run(inputs)
            return ranks.on_first(lambda: result)
    finally:
        inputs.close()


@dataclass(frozen=True)
class SensitivityRun:
    """A model's groups, the order in which their units are removed, and what to measure."""

    model: nn.Module
    structure: Structure
    order: Callable[[ChannelGroup], Tensor]
    score_key: Mapping[str, str]
    """Options and weights that the order depends on."""
    rates: Sequence[float] = ()
    """Where to measure accuracy, if inputs have labels."""
    cache: Path | None = None
    progress: Progress | None = None
    trials: bool = True
    """Whether estimated errors are corrected by measured ones."""

    def common(self, inputs: Inputs) -> dict[str, str]:
        """Return digests of what all ranks must have in common."""
        options = repr((dict(self.score_key), tuple(self.rates), self.trials))
        weights = tensors_sha256(self.model)
        return {"weights": weights, "options": options, "inputs": inputs.digest()}

    def run(self, inputs: Inputs) -> Sensitivity:
        """Measure everything that is not in the cache file yet."""
        rates = self.rates if inputs.has_labels else ()
        result = inputs.ranks.on_first(lambda: self._read_cache(inputs))
        if result is not None and result.complete and all(g.has(rates) for g in result.groups):
            return result
        branches = [(point.module, point.dim) for point in self.structure.trace.insertion_points]
        skip = count_compared(inputs) if self.trials else 0
        statistics = collect_statistics(self.model, branches, inputs, self.progress, skip=skip)
        trials = Trials(self.model, self.structure, statistics, inputs)
        if result is None:
            result = Sensitivity((), self._key(), inputs.count, inputs.digest(), complete=False)
        run = self if inputs.ranks.is_first else replace(self, cache=None)
        return run._add_accuracies(run._add_errors(result, statistics, trials), trials, rates)

    def _read_cache(self, inputs: Inputs) -> Sensitivity | None:
        """Read the cache of an earlier run; refuse to overwrite any other file."""
        if self.cache is None:
            return None
        if not self.cache.parent.is_dir():
            raise FileError(f"{self.cache} cannot be written: {self.cache.parent} is not a folder.")
        if not self.cache.exists():
            return None
        cached = Sensitivity.read(self.cache)
        for what, current, previous in (
            *((key, value, cached.asked.get(key)) for key, value in self._key().items()),
            ("set of inputs", inputs.digest(), cached.data),
        ):
            if current != previous:
                raise FileError(
                    f"{self.cache} was measured for another {what}: delete it, or give another "
                    "cache file."
                )
        return cached

    def _key(self) -> dict[str, str]:
        """Describe what is measured: options, groups, and the order of their units."""
        orders = [(p.name, self.order(p).tolist()) for p in self.structure.groups]
        digest = hashlib.sha256(json.dumps(orders).encode()).hexdigest()
        mode = "probes, and trials on other inputs" if self.trials else "probes, few rows damped"
        return {
            **self.score_key,
            "way of measuring": mode,
            "choice of groups and units": digest[:16],
        }

    def _add_errors(
        self, result: Sensitivity, statistics: ModelStatistics, trials: Trials
    ) -> Sensitivity:
        """Add the output errors of all groups that the result does not have yet."""
        if result.complete:
            return result
        known = {group.place for group in result.groups}
        missing = [n for n in range(len(self.structure.groups)) if n not in known]
        ranks = trials.ranks
        for start in range(0, len(missing), ranks.size):
            own = missing[start + ranks.rank : start + ranks.rank + 1]
            groups = [self._measure_errors(number, statistics, trials) for number in own]
            for group in chain.from_iterable(ranks.gather(groups)):
                if group is not None:
                    result = replace(result, groups=(*result.groups, group))
                    self._write_cache(result)
        if not result.groups:
            raise ModelError(
                "No group could be measured: gradients of the outputs reach no layer that "
                "consumes one."
            )
        result = replace(result, complete=True)
        self._write_cache(result)
        return result

    def _measure_errors(
        self, number: int, statistics: ModelStatistics, trials: Trials
    ) -> GroupSensitivity | None:
        """Measure the output errors of a group; None if it cannot be measured."""
        group = self.structure.groups[number]
        self._report(group.name, number)
        order = self.order(group)
        curve = error_curve(self.structure, order, statistics)
        if curve is None:
            return None
        if self.trials:
            curve = correct_curve(curve, partial(trials.error_without, order))
        return GroupSensitivity(group.name, len(group.units), tuple(curve.tolist()), number)

    def _add_accuracies(
        self, result: Sensitivity, trials: Trials, rates: Sequence[float]
    ) -> Sensitivity:
        """Add the accuracies at all rates that the result does not have yet."""
        if not rates:
            return result
        if result.accuracy is None:
            result = replace(result, accuracy=trials.accuracy())
        if result.accuracy is None:  # the model is not a classifier
            nothing = dict.fromkeys(map(str, rates))
            groups = (replace(g, accuracy={**g.accuracy, **nothing}) for g in result.groups)
            result = replace(result, groups=tuple(groups))
            self._write_cache(result)
            return result
        for number, group in enumerate(result.groups):
            if group.has(rates):
                continue
            self._report(f"accuracy, {group.name}", group.place)
            order = self.order(self.structure.groups[group.place])
            accuracy = dict(group.accuracy)
            for rate in rates:
                if str(rate) not in accuracy:
                    accuracy[str(rate)] = trials.accuracy_without(order, round(rate * group.units))
            before, after = result.groups[:number], result.groups[number + 1 :]
            result = replace(result, groups=(*before, replace(group, accuracy=accuracy), *after))
            self._write_cache(result)
        return result

    def _write_cache(self, result: Sensitivity) -> None:
        if self.cache is not None:
            with explain_write_errors(self.cache):
                write_text(self.cache, result.to_json(indent=1) + "\n")

    def _report(self, title: str, number: int) -> None:
        if self.progress is not None:
            self.progress(title, number, len(self.structure.groups))
