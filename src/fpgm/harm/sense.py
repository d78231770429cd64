"""Measuring every group: the harm at once, accuracy trial by trial, kept in a file on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from fpgm.coupling import Pool, Structure
from fpgm.errors import FileError, ModelError
from fpgm.files import write_text, writing
from fpgm.harm.curves import Floats, harm
from fpgm.harm.measure import Measured, measure
from fpgm.harm.result import GroupHarm, Sensitivity
from fpgm.harm.trials import Trials
from fpgm.progress import Progress
from fpgm.recovery.batches import Inputs

CHECKED_AT = (0.3, 0.6)
"""Shares of a group at which foretold harm is compared with what really happens."""


def corrected(curve: Floats, error: Callable[[int], float | None]) -> Floats:
    """A curve brought to what was found at some places of it.

    The probes behind it take errors for independent of each other. Those of neighbouring positions
    are alike, and where a mean over positions comes behind, they do not cancel out.
    """
    units = len(curve) - 1
    counts, ratios = [], []
    for count in sorted({round(share * units) for share in CHECKED_AT} - {0, units}):
        found = error(count)
        if found is not None and curve[count] > 0 and 0 < found < math.inf:
            counts.append(count)
            ratios.append(math.log(found / curve[count]))
    if not counts:
        return curve
    scaled = curve * np.exp(np.interp(np.arange(units + 1), counts, ratios))
    return np.maximum.accumulate(scaled)


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

    def run(self, inputs: Inputs) -> Sensitivity:
        """Everything, but for what the file holds already."""
        rates = self.rates if inputs.labelled else ()
        found = self._known(inputs)
        if found is not None and all(g.has(rates) for g in found.groups):
            return found
        branches = [(site.module, site.dim) for site in self.structure.seen.sites]
        measured = measure(self.model, branches, inputs, self.progress)
        trials = Trials(self.model, self.structure, measured, inputs)
        if found is None:
            found = self._harms(measured, inputs, trials)
            self._keep(found)
        return self._try(found, trials, rates)

    def _known(self, inputs: Inputs) -> Sensitivity | None:
        """What an earlier run wrote; anything else under that name is not to be lost."""
        if self.cache is None or not self.cache.exists():
            return None
        found = Sensitivity.read(self.cache)
        for what, mine, theirs in (
            *((key, value, found.asked.get(key)) for key, value in self.asked.items()),
            ("set of inputs", inputs.digest(), found.data),
            ("choice of groups", [], [g.name for g in found.groups if not self._has(g)]),
        ):
            if mine != theirs:
                raise FileError(
                    f"{self.cache} was measured for another {what}: remove it, or name another."
                )
        return found

    def _has(self, group: GroupHarm) -> bool:
        """Whether this group is where it was."""
        pools = self.structure.pools
        if group.place >= len(pools):
            return False
        pool = pools[group.place]
        return (pool.name, len(pool.units)) == (group.name, group.units)

    def _harms(self, measured: Measured, inputs: Inputs, trials: Trials) -> Sensitivity:
        found = []
        for number, pool in enumerate(self.structure.pools):
            self._tell(pool.name, number)
            order = self.order(pool)
            curve = harm(self.structure, order, measured)
            if curve is not None:
                curve = corrected(curve, partial(trials.error_without, order))
                found.append(GroupHarm(pool.name, len(pool.units), tuple(curve.tolist()), number))
        if not found:
            raise ModelError("No group could be measured: no layer reads what they write.")
        return Sensitivity(tuple(found), self.asked, inputs.count, inputs.digest())

    def _try(self, found: Sensitivity, trials: Trials, rates: Sequence[float]) -> Sensitivity:
        """With accuracies, of which those known already stay."""
        if not rates:
            return found
        if found.accuracy is None:
            found = replace(found, accuracy=trials.accuracy())
        if found.accuracy is None:
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
            groups = list(found.groups)
            groups[number] = replace(group, accuracy=counted)
            found = replace(found, groups=tuple(groups))
            self._keep(found)
        return found

    def _keep(self, found: Sensitivity) -> None:
        if self.cache is not None:
            with writing(self.cache):
                write_text(self.cache, found.to_json(indent=1) + "\n")

    def _tell(self, what: str, number: int) -> None:
        if self.progress is not None:
            self.progress(what, number, len(self.structure.pools))
