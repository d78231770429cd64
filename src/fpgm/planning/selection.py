"""Select units to remove: counts from the budget, equal splits where needed, lowest scores."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fpgm.criteria import ranking
from fpgm.errors import RequestError
from fpgm.planning.budget import Budget, Measure
from fpgm.planning.equal_split import Cells, Component, components
from fpgm.planning.knapsack import Allocation, Item
from fpgm.planning.unit_scores import UnitScores
from fpgm.planning.width_rounding import Rounder
from fpgm.tracing.cost_model import Cost
from fpgm.tracing.grouping import ChannelGroup, Structure
from fpgm.utils.thread_lock import pause_garbage_collection

_MAX_PARTS = 48
"""Parts whose single steps are measured after the uniform rate is found."""

_MAX_ATTEMPTS = 5
"""Attempts at a budget that is missed because the cost model is approximate."""

_NO_UNITS = torch.zeros(0, dtype=torch.int64)

ErrorOf = Callable[[ChannelGroup], Sequence[float]]
CostOf = Callable[[Measure], Cost]


@dataclass(frozen=True)
class Choice:
    """Classes to remove, and how many units every group keeps."""

    removed: Tensor
    kept: tuple[int, ...]

    @classmethod
    def from_removed(cls, structure: Structure, removed: Tensor) -> Choice:
        """Create from the classes to remove."""
        stays = torch.ones(len(structure.classes), dtype=torch.bool)
        stays[removed] = False
        return cls(removed, tuple(int(stays[p.units].sum()) for p in structure.groups))


class Selector:
    """Turns a budget into a choice of units to remove.

    Args:
        structure: The channel groups.
        scores: Scores of their units; the lowest are removed first.
        rounder: Rounds widths.
        cost_of: See the attribute, like `first` and `error_of`.
    """

    def __init__(
        self,
        structure: Structure,
        scores: UnitScores,
        rounder: Rounder,
        cost_of: CostOf,
        first: Tensor | None = None,
        error_of: ErrorOf | None = None,
    ) -> None:
        self.structure = structure
        self.scores = scores
        self.rounder = rounder
        self.cost_of = cost_of
        """Returns costs of the current structure: units may have been frozen since."""
        self.first = first
        """Classes to remove before all others, whatever their score: they are zero already."""
        self.error_of = error_of
        """Output error by how many units of a group are removed; if set, it decides the rates."""

    @pause_garbage_collection()
    def choose(self, budget: Budget) -> Choice:
        """Select the units to remove."""
        groups = self.structure.groups
        fixed = [group_rate(group, budget.rates) for group in groups]
        parts = components(groups, self.structure.balances)
        if self.error_of is not None:
            return self._allocate(budget, fixed, parts, self.error_of)
        if budget.target is None:
            return self._choice(parts, self._counts(parts, _fill_rates(fixed, budget.rate or 0.0)))
        return self._meet_target(*budget.target, fixed, parts)

    def highest_scored(self, classes: Tensor) -> Tensor:
        """Return the unit with the highest score among these classes."""
        ranked = [
            (float(score), int(unit))
            for group in self.structure.groups
            if bool(torch.isin(group.units, classes).any())
            for unit, score in zip(group.units, self.scores.group_scores(group, 0.5), strict=True)
            if bool(torch.isin(unit, classes))
        ]
        return torch.tensor([max(ranked)[1]])

    def second_units(self, choice: Choice, classes: Tensor) -> Tensor:
        """Return a unit to keep in each group with these classes of which the choice keeps one."""
        narrow = [
            group.units
            for group, kept in zip(self.structure.groups, choice.kept, strict=True)
            if kept == 1 < len(group.units) and bool(torch.isin(group.units, classes).any())
        ]
        return torch.cat([_NO_UNITS, *(self.highest_scored(units) for units in narrow)])

    def order(self, group: ChannelGroup) -> Tensor:
        """Return a group's units in order of removal."""
        return group.units[ranking(self.scores.group_scores(group, 0.5))]

    def _allocate(
        self,
        budget: Budget,
        fixed: Sequence[float | None],
        parts: Sequence[Component],
        error_of: ErrorOf,
    ) -> Choice:
        """Choose the counts with the smallest output error within the budget."""
        name, fraction = budget.target or ("macs", None)
        cost = self.cost_of(name)
        whole = cost.without(_NO_UNITS)
        if fraction is None:  # the cost that the uniform rate leaves
            counts = self._counts(parts, _fill_rates(fixed, budget.rate or 0.0))
            goal = cost.without(self._any_choice(parts, counts))
        else:
            goal = whole * (1 - fraction)
        places = {id(group): i for i, group in enumerate(self.structure.groups)}
        options = [
            self._options(part, [fixed[places[id(p)]] for p in part.groups]) for part in parts
        ]
        items = []
        for part, cells in zip(parts, options, strict=True):
            kept = [[1 - part.rate(p, c) for p in part.groups] for c in cells]
            curves = [error_of(p) for p in part.groups]
            error = [
                sum(
                    curve[round((1 - fraction) * len(p.units))]
                    for p, fraction, curve in zip(part.groups, fractions, curves, strict=True)
                )
                for fractions in kept
            ]
            own = tuple(places[id(p)] for p in part.groups)
            items.append(Item(own, np.array(kept), np.array(error, dtype=np.float64)))
        allocation = Allocation(items, cost.at, len(places))
        aim = goal
        for _ in range(_MAX_ATTEMPTS):
            chosen = allocation.within(aim)
            if chosen is None:
                break
            counts = [own[c] for own, c in zip(options, chosen, strict=True)]
            reached = cost.without(self._any_choice(parts, counts))
            if reached <= goal * (1 + 1e-9):
                return self._choice(parts, counts)
            aim *= goal / reached * (1 - 1e-4)
        raise RequestError(
            f"{name}={1 - goal / whole:.3f} cannot be reached with the frozen channels and "
            f"min_channels={self.rounder.min_channels}: request less."
        )

    def _options(self, part: Component, fixed: Sequence[float | None]) -> list[Cells]:
        """List all counts a component may have, from nothing removed up."""
        finest = max(len(p.units) // self._step(p) for p in part.groups)
        steps = (_fill_rates(fixed, i / finest) for i in range(finest + 1))
        return list(dict.fromkeys(self._solve(part, rates) for rates in steps))

    def _meet_target(
        self,
        name: Measure,
        fraction: float,
        fixed: Sequence[float | None],
        parts: Sequence[Component],
    ) -> Choice:
        """Find the uniform rate closest to a target, then adjust single groups."""
        measure = self.cost_of(name)
        whole = measure.without(_NO_UNITS)
        goal = whole * (1 - fraction)
        pinned = {
            id(group)
            for group, rate in zip(self.structure.groups, fixed, strict=True)
            if rate is not None
        }

        def counts(rate: float) -> list[Cells]:
            return self._counts(parts, _fill_rates(fixed, rate))

        def cost(cells: Sequence[Cells]) -> float:
            return measure.without(self._any_choice(parts, cells))

        low, high = 0.0, 1.0
        most = cost(counts(high))
        if most > goal:
            reachable = 1 - most / whole
            raise RequestError(
                f"{name}={fraction:g} cannot be reached: with min_channels="
                f"{self.rounder.min_channels} and the frozen channels, at most {reachable:.3f} "
                "can be removed."
            )
        at_low, at_high = counts(low), counts(high)
        while at_low != at_high and high - low > 1e-4:
            middle = (low + high) / 2
            middle_counts = counts(middle)
            if cost(middle_counts) > goal:
                low, at_low = middle, middle_counts
            else:
                high, at_high = middle, middle_counts
        nearest = min(at_low, at_high, key=lambda cells: abs(cost(cells) - goal))
        free = [i for i, p in enumerate(parts) if not any(id(q) in pinned for q in p.groups)]
        return self._choice(
            parts, self._refine(nearest, [parts[i] for i in free], free, cost, goal)
        )

    def _refine(
        self,
        cells: list[Cells],
        parts: Sequence[Component],
        places: Sequence[int],
        cost: Callable[[Sequence[Cells]], float],
        goal: float,
    ) -> list[Cells]:
        """Change single components by one alignment step while this gets closer to the goal.

        The effect of each step is measured once, on a bounded number of components, so that the
        time does not grow with the square of the depth.
        """
        best, total = list(cells), cost(cells)
        steps: list[tuple[float, int, Cells]] = []
        every = max(1, len(places) // _MAX_PARTS)
        for part, place in list(zip(parts, places, strict=True))[::every]:
            for changed in self._one_step(part, cells[place]):
                trial = [*cells[:place], changed, *cells[place + 1 :]]
                steps.append((cost(trial) - total, place, changed))
        while steps:
            worth, place, changed = min(steps, key=lambda step: abs(total + step[0] - goal))
            trial = [*best[:place], changed, *best[place + 1 :]]
            reached = cost(trial)
            if abs(reached - goal) < abs(total - goal):
                best, total = trial, reached
                steps = [step for step in steps if step[1] != place]
            else:
                steps.remove((worth, place, changed))
        return best

    def _one_step(self, part: Component, cells: Cells) -> list[Cells]:
        """Return a component's counts with its groups one alignment step smaller, and larger."""
        limits = self._limits(part)
        changed = []
        for sign in (1, -1):
            goals = []
            for group, limit in zip(part.groups, limits, strict=True):
                removed = round(part.rate(group, cells) * len(group.units)) + sign * self._step(
                    group
                )
                goals.append(min(max(0, removed), limit))
            changed.append(part.solve(goals, limits))
        return [found for found in changed if found != cells]

    def _counts(self, parts: Sequence[Component], rates: Sequence[float]) -> list[Cells]:
        """Count the units to remove from each cell of each component."""
        rate_of = dict(zip((id(p) for p in self.structure.groups), rates, strict=True))
        return [self._solve(part, [rate_of[id(p)] for p in part.groups]) for part in parts]

    def _solve(self, part: Component, rates: Sequence[float]) -> Cells:
        """Find a component's counts closest to a rate for each of its groups."""
        goals = [self._removed_count(p, rate) for p, rate in zip(part.groups, rates, strict=True)]
        return part.solve(goals, self._limits(part))

    def _limits(self, part: Component) -> list[int]:
        """Return the most units that may be removed from each group."""
        return [self._removed_count(p, 1.0) for p in part.groups]

    def _removed_count(self, group: ChannelGroup, rate: float) -> int:
        """Count the units of a group removed at a rate, once its width is rounded."""
        units = len(group.units)
        return units - self.rounder.kept_units(units, rate, group.channels_per_unit)

    def _step(self, group: ChannelGroup) -> int:
        """Return the alignment step of the group's width, in units."""
        return self.rounder.step(len(group.units), group.channels_per_unit)

    def _any_choice(self, parts: Sequence[Component], counts: Sequence[Cells]) -> Tensor:
        """Return any units in the right numbers: costs depend on numbers only."""
        chosen = [part.first(cells) for part, cells in zip(parts, counts, strict=True)]
        return torch.cat(chosen) if chosen else _NO_UNITS

    def _choice(self, parts: Sequence[Component], counts: Sequence[Cells]) -> Choice:
        removed = []
        for part, cells in zip(parts, counts, strict=True):
            if not any(cells):
                continue
            scores = torch.cat(
                [self.scores.group_scores(p, part.rate(p, cells)) for p in part.groups]
            )
            if self.first is not None:
                units = torch.cat([p.units for p in part.groups])
                scores = scores.masked_fill(torch.isin(units, self.first), -math.inf)
            removed.append(part.lowest(cells, scores))
        units = torch.cat(removed) if removed else _NO_UNITS
        return Choice.from_removed(self.structure, units)


def group_rate(group: ChannelGroup, rates: Mapping[str, float]) -> float | None:
    """Look up a group's rate by layer pattern; the lowest one if its layers disagree."""
    matching = [
        rate
        for pattern, rate in rates.items()
        if any(fnmatch.fnmatchcase(layer, pattern) for layer in group.layers)
    ]
    return min(matching, default=None)


def _fill_rates(fixed: Sequence[float | None], rate: float) -> list[float]:
    """Fill missing rates with one rate."""
    return [rate if given is None else given for given in fixed]
