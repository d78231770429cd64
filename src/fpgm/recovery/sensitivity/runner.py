"""Measuring every group: the harm at once, accuracy trial by trial, kept in a file on the way."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fpgm.errors import FileError, ModelError
from fpgm.planning.planner import Planner
from fpgm.recovery.sensitivity.error_curves import Floats, harm
from fpgm.recovery.sensitivity.probes import Measured, measure
from fpgm.recovery.sensitivity.result import GroupHarm, Sensitivity
from fpgm.recovery.sensitivity.trials import Trials
from fpgm.tracing.grouping import Pool, Structure
from fpgm.utils.atomic_io import write_text, writing
from fpgm.utils.calibration_data import Inputs, explained, moved, read_inputs
from fpgm.utils.preserve_state import undisturbed
from fpgm.utils.progress import Progress

IMAGES = 512
"""Inputs that sensitivity looks at."""

CHECKED_AT = (0.3, 0.6)
"""Shares of a group at which foretold harm is compared with what really happens."""


def corrected(curve: Floats, error: Callable[[int], float | None]) -> Floats:
    """A curve brought to what was found at some places of it.

    The probes behind it take errors for independent of each other. Those of neighbouring positions
    are alike, and where a mean over positions comes behind, they do not cancel out.
    """
    units = len(curve) - 1
    counts = sorted({round(share * units) for share in CHECKED_AT} - {0, units})
    errors = {count: error(count) for count in counts}
    found = {c: e for c, e in errors.items() if e is not None and 0 < e < math.inf}
    if not found:
        return curve
    places = np.arange(units + 1)
    if any(curve[count] <= 0 for count in found):  # probes saw nothing: a line through what is
        last = max(found)
        line = np.interp(places, [0, *found], [0.0, *found.values()])
        return np.maximum.accumulate(np.where(places > last, found[last] / last * places, line))
    ratios = [math.log(e / curve[c]) for c, e in found.items()]
    return np.maximum.accumulate(curve * np.exp(np.interp(places, list(found), ratios)))


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
    """Measure the output error that removing each group's units causes, in a planner's order."""
    inputs = read_inputs(moved(planner.model, loader), images)
    try:
        with undisturbed(planner.model), explained(planner.model, inputs):
            planner.model.eval()
            run = Sense(
                planner.model,
                planner.structure,
                planner.order,
                planner.score_key(),
                rates,
                cache,
                progress,
                trials,
            )
            return run.run(inputs)
    finally:
        inputs.close()


@dataclass(frozen=True)
class Sense:
    """A model's groups, the order in which their units would go, and what to measure."""

    model: nn.Module
    structure: Structure
    order: Callable[[Pool], Tensor]
    asked: Mapping[str, str]
    rates: Sequence[float] = ()
    """Accuracy is counted at these, where inputs have labels."""
    cache: Path | None = None
    progress: Progress | None = None
    trials: bool = True
    """Whether foretold harm is compared with what really happens."""

    def run(self, inputs: Inputs) -> Sensitivity:
        """Everything, but for what the file holds already."""
        rates = self.rates if inputs.labelled else ()
        found = self._known(inputs)
        if found is not None and found.complete and all(g.has(rates) for g in found.groups):
            return found
        branches = [(site.module, site.dim) for site in self.structure.seen.sites]
        measured = measure(self.model, branches, inputs, self.progress)
        trials = Trials(self.model, self.structure, measured, inputs)
        if found is None:
            found = Sensitivity((), self._key(), inputs.count, inputs.digest(), complete=False)
        return self._try(self._harms(found, measured, trials), trials, rates)

    def _known(self, inputs: Inputs) -> Sensitivity | None:
        """What an earlier run wrote; anything else under that name is not to be lost."""
        if self.cache is None:
            return None
        if not self.cache.parent.is_dir():
            raise FileError(f"{self.cache} cannot be written: {self.cache.parent} is no folder.")
        if not self.cache.exists():
            return None
        found = Sensitivity.read(self.cache)
        for what, mine, theirs in (
            *((key, value, found.asked.get(key)) for key, value in self._key().items()),
            ("set of inputs", inputs.digest(), found.data),
        ):
            if mine != theirs:
                raise FileError(
                    f"{self.cache} was measured for another {what}: remove it, or name another."
                )
        return found

    def _key(self) -> dict[str, str]:
        """What was asked, and which units of which groups would go in which order."""
        orders = [(p.name, self.order(p).tolist()) for p in self.structure.pools]
        digest = hashlib.sha256(json.dumps(orders).encode()).hexdigest()
        way = "probes and trials" if self.trials else "probes"
        return {**self.asked, "way of measuring": way, "choice of groups and units": digest[:16]}

    def _harms(self, found: Sensitivity, measured: Measured, trials: Trials) -> Sensitivity:
        """With every group's harm, of which those known already stay."""
        if found.complete:
            return found
        known = {group.place for group in found.groups}
        for number, pool in enumerate(self.structure.pools):
            if number in known:
                continue
            self._tell(pool.name, number)
            order = self.order(pool)
            curve = harm(self.structure, order, measured)
            if curve is not None:
                if self.trials:
                    curve = corrected(curve, partial(trials.error_without, order))
                group = GroupHarm(pool.name, len(pool.units), tuple(curve.tolist()), number)
                found = replace(found, groups=(*found.groups, group))
                self._keep(found)
        if not found.groups:
            raise ModelError(
                "No group could be measured: no layer that reads one leads to an output by way of "
                "gradients."
            )
        found = replace(found, complete=True)
        self._keep(found)
        return found

    def _try(self, found: Sensitivity, trials: Trials, rates: Sequence[float]) -> Sensitivity:
        """With accuracies, of which those known already stay."""
        if not rates:
            return found
        if found.accuracy is None:
            found = replace(found, accuracy=trials.accuracy())
        if found.accuracy is None:  # its answers are not one score a class
            nothing = dict.fromkeys(map(str, rates))
            groups = (replace(g, accuracy={**g.accuracy, **nothing}) for g in found.groups)
            found = replace(found, groups=tuple(groups))
            self._keep(found)
            return found
        for number, group in enumerate(found.groups):
            if group.has(rates):
                continue
            self._tell(f"accuracy, {group.name}", group.place)
            order = self.order(self.structure.pools[group.place])
            counted = dict(group.accuracy)
            for rate in rates:
                if str(rate) not in counted:
                    counted[str(rate)] = trials.accuracy_without(order, round(rate * group.units))
            before, after = found.groups[:number], found.groups[number + 1 :]
            found = replace(found, groups=(*before, replace(group, accuracy=counted), *after))
            self._keep(found)
        return found

    def _keep(self, found: Sensitivity) -> None:
        if self.cache is not None:
            with writing(self.cache):
                write_text(self.cache, found.to_json(indent=1) + "\n")

    def _tell(self, what: str, number: int) -> None:
        if self.progress is not None:
            self.progress(what, number, len(self.structure.pools))
