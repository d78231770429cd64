"""Choosing which units go: scores per layer, counts from the budget, equal shares where needed."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fpgm import criteria
from fpgm.allocation import Allocation, Item
from fpgm.balance import Cells, Component, components
from fpgm.budget import Budget, Measure, Rounder
from fpgm.costs import Cost
from fpgm.coupling import Pool, Structure, Writer
from fpgm.errors import RequestError
from fpgm.tensors import modules_by_path, named_tensors

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)

_MOST_PARTS = 48
"""Parts whose single steps are measured after the uniform rate is found."""

_AIMS = 5
"""Tries at a budget that is missed because costs were only nearly known."""

_NOTHING = torch.zeros(0, dtype=torch.int64)

Scorer = Callable[[Tensor, float], Tensor]

HarmOf = Callable[[Pool], Sequence[float]]
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
    """Turns a budget into a choice; scores are computed once per rate and remembered."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        scorer_of: Callable[[str], Scorer],
        rounder: Rounder,
        cost_of: CostOf,
        uses_scale: bool = False,
        first: Tensor | None = None,
        harm_of: HarmOf | None = None,
    ) -> None:
        self.tensors = named_tensors(model)
        self.modules = modules_by_path(model)
        self.structure = structure
        self.scorer_of = scorer_of
        self.rounder = rounder
        self.cost_of = cost_of
        """Costs of the structure as it is now: units may have been frozen since."""
        self.uses_scale = uses_scale
        self.first = first
        """Classes that go before all others, whatever their score: they are gone already."""
        self.harm_of = harm_of
        """What removing so many units of a pool does; if known, rates are chosen by it."""
        self._layer_scores: dict[tuple[int, float], Tensor] = {}

    def choose(self, budget: Budget) -> Choice:
        """The units to remove."""
        pools = self.structure.pools
        fixed = [pool_rate(pool, budget.rates) for pool in pools]
        parts = components(pools, self.structure.balances)
        if self.harm_of is not None:
            return self._allocate(budget, fixed, parts, self.harm_of)
        if budget.target is None:
            rates = [(budget.rate or 0.0) if rate is None else rate for rate in fixed]
            return self._choice(parts, self._counts(parts, rates))
        return self._reach(*budget.target, fixed, parts)

    def dearest(self, classes: Tensor) -> Tensor:
        """Of these classes, the unit with the highest score."""
        ranked = [
            (float(score), int(unit))
            for pool in self.structure.pools
            if bool(torch.isin(pool.units, classes).any())
            for unit, score in zip(pool.units, self._scores(pool, 0.5), strict=True)
            if bool(torch.isin(unit, classes))
        ]
        return torch.tensor([max(ranked)[1]])

    def order(self, pool: Pool) -> Tensor:
        """A pool's units, the first to go first."""
        return pool.units[criteria.ranking(self._scores(pool, 0.5))]

    def _allocate(
        self,
        budget: Budget,
        fixed: Sequence[float | None],
        parts: Sequence[Component],
        harm_of: HarmOf,
    ) -> Choice:
        """The counts that do the least harm for what the budget allows."""
        name, share = budget.target or ("macs", None)
        cost = self.cost_of(name)
        whole = cost.without(_NOTHING)
        if share is None:  # as much as the uniform rate leaves
            rates = [(budget.rate or 0.0) if rate is None else rate for rate in fixed]
            goal = cost.without(self._any_choice(parts, self._counts(parts, rates)))
        else:
            goal = whole * (1 - share)
        places = {id(pool): i for i, pool in enumerate(self.structure.pools)}
        options = [
            self._options(part, [fixed[places[id(p)]] for p in part.pools]) for part in parts
        ]
        items = []
        for part, cells in zip(parts, options, strict=True):
            kept = [[1 - part.rate(p, c) for p in part.pools] for c in cells]
            curves = [harm_of(p) for p in part.pools]
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
        limits = self._limits(part)
        sizes = [len(p.units) for p in part.pools]
        widths = [p.channels_per_unit for p in part.pools]
        finest = max(
            size // self.rounder.step(size, width)
            for size, width in zip(sizes, widths, strict=True)
        )
        shares = [i / finest for i in range(finest + 1)]
        steps = [[share if rate is None else rate for rate in fixed] for share in shares]
        found: dict[Cells, None] = {}
        for rates in steps:
            goals = [
                size - self.rounder.kept(size, rate, width)
                for size, rate, width in zip(sizes, rates, widths, strict=True)
            ]
            found.setdefault(part.solve(goals, limits))
        return list(found)

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
            return self._counts(parts, [rate if own is None else own for own in fixed])

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
        changed = []
        for sign in (1, -1):
            goals = []
            for pool in part.pools:
                units, width = len(pool.units), pool.channels_per_unit
                removed = round(part.rate(pool, cells) * units)
                removed += sign * self.rounder.step(units, width)
                goals.append(max(0, removed))
            limits = self._limits(part)
            goals = [min(goal, limit) for goal, limit in zip(goals, limits, strict=True)]
            changed.append(part.solve(goals, limits))
        return [found for found in changed if found != cells]

    def _counts(self, parts: Sequence[Component], rates: Sequence[float]) -> list[Cells]:
        """How many units of each cell of each component go."""
        by_name = dict(zip((id(p) for p in self.structure.pools), rates, strict=True))
        found = []
        for part in parts:
            goals = [
                len(p.units) - self.rounder.kept(len(p.units), by_name[id(p)], p.channels_per_unit)
                for p in part.pools
            ]
            found.append(part.solve(goals, self._limits(part)))
        return found

    def _limits(self, part: Component) -> list[int]:
        """The most that may go from each pool."""
        return [
            len(p.units) - self.rounder.kept(len(p.units), 1.0, p.channels_per_unit)
            for p in part.pools
        ]

    def _any_choice(self, parts: Sequence[Component], counts: Sequence[Cells]) -> Tensor:
        """Some units in the right numbers: costs depend on numbers only."""
        chosen = [part.first(cells) for part, cells in zip(parts, counts, strict=True)]
        return torch.cat(chosen) if chosen else _NOTHING

    def _choice(self, parts: Sequence[Component], counts: Sequence[Cells]) -> Choice:
        removed = []
        for part, cells in zip(parts, counts, strict=True):
            if not any(cells):
                continue
            scores = torch.cat([self._scores(p, part.rate(p, cells)) for p in part.pools])
            if self.first is not None:
                units = torch.cat([p.units for p in part.pools])
                scores = scores.masked_fill(torch.isin(units, self.first), -math.inf)
            removed.append(part.lowest(cells, scores))
        gone = torch.cat(removed) if removed else _NOTHING
        return Choice.of(self.structure, gone)

    def _scores(self, pool: Pool, rate: float) -> Tensor:
        """Mean over the layers of each unit's score, each layer brought to mean 1 first.

        A depthwise convolution has no say where its units have a filter elsewhere: it hands on
        what that filter wrote.
        """
        writers = [w for w in pool.writers if not w.carries] or list(pool.writers)
        if len(writers) == 1 and torch.equal(writers[0].classes, pool.units):
            return self._writer_scores(writers[0], rate)
        total = torch.zeros(len(pool.units), dtype=torch.float64)
        order = pool.units.argsort()
        ranked = pool.units[order]
        for writer in writers:
            scores = self._writer_scores(writer, rate)
            near = torch.searchsorted(ranked, writer.classes).clamp(max=len(ranked) - 1)
            mine = torch.where(ranked[near] == writer.classes, order[near], -1)
            rows = mine >= 0
            summed = torch.zeros_like(total).index_add(0, mine[rows], scores[rows])
            times = torch.zeros_like(total).index_add(0, mine[rows], torch.ones_like(scores[rows]))
            mean = scores.abs().mean()
            total += summed / times / (mean if len(writers) > 1 and mean > 0 else 1)
        return total

    def _writer_scores(self, writer: Writer, rate: float) -> Tensor:
        key = (id(writer), rate)
        if key not in self._layer_scores:
            weight = self.tensors[writer.slot.name].detach()
            rows = self._scale_of(writer) if self.uses_scale else writer.filters(weight)
            scorer = self.scorer_of(writer.layer)
            self._layer_scores[key] = criteria.score(scorer, rows, rate, writer.layer)
        return self._layer_scores[key]

    def _scale_of(self, writer: Writer) -> Tensor:
        """|γ| of the norm behind a layer, found as the scale whose classes are the layer's."""
        for slot in self.structure.seen.slots.values():
            owner = self.modules.get(slot.name.rpartition(".")[0])
            if slot.trainable and slot.roles == ["scale"] and isinstance(owner, _NORMS):
                own = self.structure.of(slot.fields[0])
                if torch.equal(own, writer.classes):
                    return self.tensors[slot.name].detach()[:, None]
        raise RequestError(
            f"criterion='bn': layer '{writer.layer}' has no norm with a scale behind it; "
            "ignore it or choose another criterion."
        )


def pool_rate(pool: Pool, rates: Mapping[str, float]) -> float | None:
    """A rate by layer pattern; where a pool's layers disagree, the most careful one holds."""
    matching = [
        rate
        for pattern, rate in rates.items()
        if any(fnmatch.fnmatchcase(layer, pattern) for layer in pool.layers)
    ]
    return min(matching, default=None)
