"""Choosing which units go: counts from the budget, equal shares where needed, the lowest scores."""

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
from fpgm.planning.allocation import Allocation, Item
from fpgm.planning.budget import Budget, Measure, Rounder
from fpgm.planning.equal_split import Cells, Component, components
from fpgm.planning.unit_scores import UnitScores
from fpgm.tracing.cost_model import Cost
from fpgm.tracing.grouping import Pool, Structure

_MOST_PARTS = 48
"""Parts whose single steps are measured after the uniform rate is found."""

_AIMS = 5
"""Tries at a budget that is missed because costs were only nearly known."""

_NOTHING = torch.zeros(0, dtype=torch.int64)

ErrorOf = Callable[[Pool], Sequence[float]]
CostOf = Callable[[Measure], Cost]


@dataclass(frozen=True)
class Choice:
    """Classes that go, and what that leaves."""

    removed: Tensor
    kept: tuple[int, ...]

    @classmethod
    def of(cls, structure: Structure, removed: Tensor) -> Choice:
        """These classes, and what stays of every pool."""
        stays = torch.ones(len(structure.classes), dtype=torch.bool)
        stays[removed] = False
        return cls(removed, tuple(int(stays[p.units].sum()) for p in structure.pools))


class Selector:
    """Turns a budget into a choice."""

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
        """Costs of the structure as it is now: units may have been frozen since."""
        self.first = first
        """Classes that go before all others, whatever their score: they are gone already."""
        self.error_of = error_of
        """What removing so many units of a pool does; if known, rates are chosen by it."""

    def choose(self, budget: Budget) -> Choice:
        """The units to remove."""
        pools = self.structure.pools
        fixed = [pool_rate(pool, budget.rates) for pool in pools]
        parts = components(pools, self.structure.balances)
        if self.error_of is not None:
            return self._allocate(budget, fixed, parts, self.error_of)
        if budget.target is None:
            return self._choice(parts, self._counts(parts, _filled(fixed, budget.rate or 0.0)))
        return self._reach(*budget.target, fixed, parts)

    def dearest(self, classes: Tensor) -> Tensor:
        """Of these classes, the unit with the highest score."""
        ranked = [
            (float(score), int(unit))
            for pool in self.structure.pools
            if bool(torch.isin(pool.units, classes).any())
            for unit, score in zip(pool.units, self.scores.of(pool, 0.5), strict=True)
            if bool(torch.isin(unit, classes))
        ]
        return torch.tensor([max(ranked)[1]])

    def order(self, pool: Pool) -> Tensor:
        """A pool's units, the first to go first."""
        return pool.units[ranking(self.scores.of(pool, 0.5))]

    def _allocate(
        self,
        budget: Budget,
        fixed: Sequence[float | None],
        parts: Sequence[Component],
        error_of: ErrorOf,
    ) -> Choice:
        """The counts that do the least harm for what the budget allows."""
        name, share = budget.target or ("macs", None)
        cost = self.cost_of(name)
        whole = cost.without(_NOTHING)
        if share is None:  # as much as the uniform rate leaves
            counts = self._counts(parts, _filled(fixed, budget.rate or 0.0))
            goal = cost.without(self._any_choice(parts, counts))
        else:
            goal = whole * (1 - share)
        places = {id(pool): i for i, pool in enumerate(self.structure.pools)}
        options = [
            self._options(part, [fixed[places[id(p)]] for p in part.pools]) for part in parts
        ]
        items = []
        for part, cells in zip(parts, options, strict=True):
            kept = [[1 - part.rate(p, c) for p in part.pools] for c in cells]
            curves = [error_of(p) for p in part.pools]
            harm = [
                sum(
                    curve[round((1 - share) * len(p.units))]
                    for p, share, curve in zip(part.pools, shares, curves, strict=True)
                )
                for shares in kept
            ]
            own = tuple(places[id(p)] for p in part.pools)
            items.append(Item(own, np.array(kept), np.array(harm, dtype=np.float64)))
        allocation = Allocation(items, cost.at, len(places))
        aim = goal
        for _ in range(_AIMS):
            chosen = allocation.within(aim)
            if chosen is None:
                break
            counts = [own[c] for own, c in zip(options, chosen, strict=True)]
            reached = cost.without(self._any_choice(parts, counts))
            if reached <= goal * (1 + 1e-9):
                return self._choice(parts, counts)
            aim *= goal / reached * (1 - 1e-4)
        raise RequestError(
            f"{name}={1 - goal / whole:.3f} cannot be reached with what is frozen and "
            f"min_channels={self.rounder.min_channels}: ask for less."
        )

    def _options(self, part: Component, fixed: Sequence[float | None]) -> list[Cells]:
        """All counts a part may have, from nothing removed up."""
        finest = max(len(p.units) // self._step(p) for p in part.pools)
        steps = (_filled(fixed, i / finest) for i in range(finest + 1))
        return list(dict.fromkeys(self._solved(part, rates) for rates in steps))

    def _reach(
        self,
        name: Measure,
        share: float,
        fixed: Sequence[float | None],
        parts: Sequence[Component],
    ) -> Choice:
        """The uniform rate whose plan is nearest to a target, then single steps towards it."""
        measure = self.cost_of(name)
        whole = measure.without(_NOTHING)
        goal = whole * (1 - share)
        pinned = {
            id(pool)
            for pool, rate in zip(self.structure.pools, fixed, strict=True)
            if rate is not None
        }

        def counts(rate: float) -> list[Cells]:
            return self._counts(parts, _filled(fixed, rate))

        def cost(cells: Sequence[Cells]) -> float:
            return measure.without(self._any_choice(parts, cells))

        low, high = 0.0, 1.0
        most = cost(counts(high))
        if most > goal:
            reachable = 1 - most / whole
            raise RequestError(
                f"{name}={share:g} cannot be reached: with min_channels="
                f"{self.rounder.min_channels} and what is frozen, at most {reachable:.3f} can go."
            )
        at_low, at_high = counts(low), counts(high)
        while at_low != at_high and high - low > 1e-4:
            middle = (low + high) / 2
            found = counts(middle)
            if cost(found) > goal:
                low, at_low = middle, found
            else:
                high, at_high = middle, found
        nearest = min(at_low, at_high, key=lambda cells: abs(cost(cells) - goal))
        free = [i for i, p in enumerate(parts) if not any(id(q) in pinned for q in p.pools)]
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
        """Move single parts by one alignment step while that brings the goal nearer.

        What a step of a part is worth is measured once, on a bounded number of parts, so that the
        time does not grow with the square of the depth.
        """
        best, total = list(cells), cost(cells)
        steps: list[tuple[float, int, Cells]] = []
        every = max(1, len(places) // _MOST_PARTS)
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
        """The part's counts with its pools one alignment step smaller, and one larger."""
        limits = self._limits(part)
        changed = []
        for sign in (1, -1):
            goals = []
            for pool, limit in zip(part.pools, limits, strict=True):
                removed = round(part.rate(pool, cells) * len(pool.units)) + sign * self._step(pool)
                goals.append(min(max(0, removed), limit))
            changed.append(part.solve(goals, limits))
        return [found for found in changed if found != cells]

    def _counts(self, parts: Sequence[Component], rates: Sequence[float]) -> list[Cells]:
        """How many units of each cell of each component go."""
        of_pool = dict(zip((id(p) for p in self.structure.pools), rates, strict=True))
        return [self._solved(part, [of_pool[id(p)] for p in part.pools]) for part in parts]

    def _solved(self, part: Component, rates: Sequence[float]) -> Cells:
        """The counts of a part nearest to a rate for each of its pools."""
        goals = [self._gone(p, rate) for p, rate in zip(part.pools, rates, strict=True)]
        return part.solve(goals, self._limits(part))

    def _limits(self, part: Component) -> list[int]:
        """The most that may go from each pool."""
        return [self._gone(p, 1.0) for p in part.pools]

    def _gone(self, pool: Pool, rate: float) -> int:
        """Units of a pool that go at a rate, once its width is rounded."""
        units = len(pool.units)
        return units - self.rounder.kept(units, rate, pool.channels_per_unit)

    def _step(self, pool: Pool) -> int:
        """Units by which the pool's width changes at once."""
        return self.rounder.step(len(pool.units), pool.channels_per_unit)

    def _any_choice(self, parts: Sequence[Component], counts: Sequence[Cells]) -> Tensor:
        """Some units in the right numbers: costs depend on numbers only."""
        chosen = [part.first(cells) for part, cells in zip(parts, counts, strict=True)]
        return torch.cat(chosen) if chosen else _NOTHING

    def _choice(self, parts: Sequence[Component], counts: Sequence[Cells]) -> Choice:
        removed = []
        for part, cells in zip(parts, counts, strict=True):
            if not any(cells):
                continue
            scores = torch.cat([self.scores.of(p, part.rate(p, cells)) for p in part.pools])
            if self.first is not None:
                units = torch.cat([p.units for p in part.pools])
                scores = scores.masked_fill(torch.isin(units, self.first), -math.inf)
            removed.append(part.lowest(cells, scores))
        gone = torch.cat(removed) if removed else _NOTHING
        return Choice.of(self.structure, gone)


def pool_rate(pool: Pool, rates: Mapping[str, float]) -> float | None:
    """A rate by layer pattern; where a pool's layers disagree, the most careful one holds."""
    matching = [
        rate
        for pattern, rate in rates.items()
        if any(fnmatch.fnmatchcase(layer, pattern) for layer in pool.layers)
    ]
    return min(matching, default=None)


def _filled(fixed: Sequence[float | None], rate: float) -> list[float]:
    """Rates that were given, and one for all others."""
    return [rate if own is None else own for own in fixed]
