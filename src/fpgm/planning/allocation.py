"""Which rate for which group: the least harm for a given cost.

Harm adds up over groups, cost does not: what a layer costs depends on what it reads and on what it
writes. So for a price of cost every group takes what is best given the others, over and over until
nothing changes; the price is found by bisection; and a knapsack among the neighbours of what was
found, solved exactly, spends what is left of the budget.
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
"""Into so many parts the knapsack cuts what may be spent."""
_NEAR = (4, 16, 64, 10**6)
"""How many options to either side knapsacks look at, one after another."""
_KNAPSACKS = 8
"""Of each kind, at most."""
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Item:
    """Something to decide on: what each option keeps of the pools it is about, and its harm."""

    pools: tuple[int, ...]
    kept: Floats
    """[options, pools]"""
    harm: Floats
    """[options]; the first option keeps all."""


class Allocation:
    """Choosing one option of every item."""

    def __init__(self, items: Sequence[Item], cost: Callable[[Floats], Floats], pools: int) -> None:
        self.items, self.cost, self.pools = items, cost, pools

    def within(self, goal: float) -> list[int] | None:
        """The choice of least harm that costs at most so much; None if nothing is cheap enough."""
        goal *= _ROUNDING
        low, high = 0.0, 1.0
        best = self._settle(high, [len(item.harm) // 2 for item in self.items])
        while self._total(best) > goal:
            low, high = high, high * 8
            if high > 1e18:
                return None
            best = self._settle(high, best)
        for _ in range(_BISECTIONS):
            price = (low * high) ** 0.5 if low else high / 8
            found = self._settle(price, best)
            if self._total(found) <= goal:
                high = price
                best = min(found, best, key=self._harm)
            else:
                low = price
            if low and high / low < 1.0001:
                break
        return self._spend(best, goal)

    def _settle(self, price: float, start: Sequence[int]) -> list[int]:
        """Every item's best option at a price, given all others, until none changes."""
        choice = list(start)
        scale = float(self.cost(np.ones(self.pools)))
        for _ in range(_SWEEPS):
            changed = False
            for number, item in enumerate(self.items):
                costs = self._costs(choice, number)
                best = int(np.argmin(item.harm + price * costs / scale))
                changed |= best != choice[number]
                choice[number] = best
            if not changed:
                break
        return choice

    def _spend(self, choice: list[int], goal: float) -> list[int]:
        """Knapsacks among neighbouring options, with costs as they are where the others stand."""
        for near in _NEAR:
            for _ in range(_KNAPSACKS):
                better = self._better(choice, goal, near)
                if better is None:
                    break
                choice = better
        return choice

    def _better(self, choice: list[int], goal: float, near: int) -> list[int] | None:
        """A knapsack's answer, if it keeps the goal and does less harm."""
        room = goal - self._total(choice)
        while room > 1e-9 * goal:
            found = self._knapsack(choice, room, near)
            if self._total(found) <= goal:
                return found if self._harm(found) < self._harm(choice) else None
            room *= 0.8  # together they cost more than one by one
        return None

    def _knapsack(self, choice: Sequence[int], room: float, reach: int) -> list[int]:
        """The least harm among neighbours for at most `room` more cost, exact to a bin."""
        options: list[list[int]] = []
        deltas: list[Floats] = []
        for number, item in enumerate(self.items):
            first, last = max(0, choice[number] - reach), choice[number] + reach + 1
            near = list(range(first, min(last, len(item.harm))))
            costs = self._costs(choice, number)
            options.append(near)
            deltas.append(costs[near] - costs[choice[number]])
        saved = -sum(float(delta.min()) for delta in deltas)
        if saved + room <= 0:
            return list(choice)
        width = (saved + room) / _BINS
        # Every item pays what its option costs more than its cheapest, rounded up to whole bins.
        harm = np.zeros(_BINS + 1)
        taken = []
        for item, near, delta in zip(self.items, options, deltas, strict=True):
            bins = np.ceil((delta - delta.min()) / width - 1e-9).astype(int)
            trials = np.full((len(near), _BINS + 1), np.inf)
            for row, (option, paid) in enumerate(zip(near, bins, strict=True)):
                if paid <= _BINS:
                    trials[row, paid:] = harm[: _BINS + 1 - paid] + item.harm[option]
            taken.append((trials.argmin(0), bins))
            harm = trials.min(0)
        found = []
        place = _BINS
        for near, (rows, bins) in zip(reversed(options), reversed(taken), strict=True):
            row = int(rows[place])
            found.append(near[row])
            place -= int(bins[row])
        return found[::-1]

    def _costs(self, choice: Sequence[int], number: int) -> Floats:
        """Total costs with each option of one item."""
        item = self.items[number]
        kept = np.repeat(self._kept(choice)[None], len(item.harm), axis=0)
        kept[:, list(item.pools)] = item.kept
        return self.cost(kept)

    def _kept(self, choice: Sequence[int]) -> Floats:
        kept = np.ones(self.pools)
        for item, option in zip(self.items, choice, strict=True):
            kept[list(item.pools)] = item.kept[option]
        return kept

    def _total(self, choice: Sequence[int]) -> float:
        return float(self.cost(self._kept(choice)))

    def _harm(self, choice: Sequence[int]) -> float:
        return float(sum(i.harm[o] for i, o in zip(self.items, choice, strict=True)))
