"""Choose a rate for every group: the smallest output error for a given cost.

Errors add up over groups, costs do not: the cost of a layer depends on its input and its output
channels. Lagrangian relaxation by coordinate descent, bisecting on the multiplier (the price per
unit of cost). Then an exact knapsack over neighboring options spends the rest of the budget.
`selection` makes the items, from error curves that `recovery.sensitivity` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_SWEEPS = 50
_BISECTIONS = 40
_BINS = 20_000
"""Number of bins into which the knapsack divides the budget."""
_REACHES = (4, 16, 64, 10**6)
"""How many options to either side the knapsacks consider, one after another."""
_KNAPSACKS = 8
"""At most this many for each reach."""
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Item:
    """One decision: the fraction of its groups that each option keeps, and its output error."""

    groups: tuple[int, ...]
    kept: Floats
    """[options, groups]"""
    error: Floats
    """[options]; the first option keeps all."""


class Allocation:
    """Chooses one option of every item."""

    def __init__(
        self, items: Sequence[Item], cost: Callable[[Floats], Floats], groups: int
    ) -> None:
        self.items, self.cost, self.groups = items, cost, groups

    def within(self, goal: float) -> list[int] | None:
        """Return the choice with the smallest error within a cost; None if none is cheap enough."""
        goal *= _ROUNDING
        low, high = 0.0, 1.0
        best = self._choose_at_price(high, [len(item.error) // 2 for item in self.items])
        while self._total(best) > goal:
            low, high = high, high * 8
            if high > 1e18:
                return None
            best = self._choose_at_price(high, best)
        for _ in range(_BISECTIONS):
            price = (low * high) ** 0.5 if low else high / 8
            trial = self._choose_at_price(price, best)
            if self._total(trial) <= goal:
                high = price
                best = min(trial, best, key=self._error)
            else:
                low = price
            if low and high / low < 1.0001:
                break
        return self._spend_rest(best, goal)

    def _choose_at_price(self, price: float, start: Sequence[int]) -> list[int]:
        """Choose every item's best option at a price, given the others, until none changes."""
        choice = list(start)
        scale = float(self.cost(np.ones(self.groups)))
        for _ in range(_SWEEPS):
            changed = False
            for number, item in enumerate(self.items):
                costs = self._costs(choice, number)
                best = int(np.argmin(item.error + price * costs / scale))
                changed |= best != choice[number]
                choice[number] = best
            if not changed:
                break
        return choice

    def _spend_rest(self, choice: list[int], goal: float) -> list[int]:
        """Solve knapsacks among neighboring options, with the other items as they are."""
        for near in _REACHES:
            for _ in range(_KNAPSACKS):
                better = self._improve(choice, goal, near)
                if better is None:
                    break
                choice = better
        return choice

    def _improve(self, choice: list[int], goal: float, near: int) -> list[int] | None:
        """Return a knapsack's choice if it meets the goal and has a smaller error."""
        room = goal - self._total(choice)
        while room > 1e-9 * goal:
            trial = self._knapsack(choice, room, near)
            if self._total(trial) <= goal:
                return trial if self._error(trial) < self._error(choice) else None
            room *= 0.8  # together they cost more than one by one
        return None

    def _knapsack(self, choice: Sequence[int], room: float, reach: int) -> list[int]:
        """Minimize the error among neighbors for at most `room` more cost, exact to a bin."""
        options: list[list[int]] = []
        deltas: list[Floats] = []
        for number, item in enumerate(self.items):
            first, last = max(0, choice[number] - reach), choice[number] + reach + 1
            near = list(range(first, min(last, len(item.error))))
            costs = self._costs(choice, number)
            options.append(near)
            deltas.append(costs[near] - costs[choice[number]])
        saved = -sum(float(delta.min()) for delta in deltas)
        if saved + room <= 0:
            return list(choice)
        width = (saved + room) / _BINS
        # Every item pays what its option costs more than its cheapest, rounded up to whole bins.
        error = np.zeros(_BINS + 1)
        best_rows = []
        for item, near, delta in zip(self.items, options, deltas, strict=True):
            bins = np.ceil((delta - delta.min()) / width - 1e-9).astype(int)
            trials = np.full((len(near), _BINS + 1), np.inf)
            for row, (option, paid) in enumerate(zip(near, bins, strict=True)):
                if paid <= _BINS:
                    trials[row, paid:] = error[: _BINS + 1 - paid] + item.error[option]
            best_rows.append((trials.argmin(0), bins))
            error = trials.min(0)
        chosen = []
        place = _BINS
        for near, (rows, bins) in zip(reversed(options), reversed(best_rows), strict=True):
            row = int(rows[place])
            chosen.append(near[row])
            place -= int(bins[row])
        return chosen[::-1]

    def _costs(self, choice: Sequence[int], number: int) -> Floats:
        """Return the total cost with each option of one item."""
        item = self.items[number]
        kept = np.repeat(self._kept_fractions(choice)[None], len(item.error), axis=0)
        kept[:, list(item.groups)] = item.kept
        return self.cost(kept)

    def _kept_fractions(self, choice: Sequence[int]) -> Floats:
        kept = np.ones(self.groups)
        for item, option in zip(self.items, choice, strict=True):
            kept[list(item.groups)] = item.kept[option]
        return kept

    def _total(self, choice: Sequence[int]) -> float:
        return float(self.cost(self._kept_fractions(choice)))

    def _error(self, choice: Sequence[int]) -> float:
        return float(sum(i.error[o] for i, o in zip(self.items, choice, strict=True)))
