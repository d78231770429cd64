"""What a model costs as a formula of how much of every pool stays, fast enough to search with.

For MACs and parameters it is exact where every unit of a pool has as many channels as the others
in each tensor it runs through; what is chosen by it is counted exactly afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fpgm.tracing.grouping import Structure
from fpgm.tracing.labels import Fields

Floats = npt.NDArray[np.float64]


class Cost(Protocol):
    """Something of which a share is to go."""

    def at(self, kept: Floats) -> Floats:
        """Costs where these shares of each pool stay: [pools] or [many, pools]."""

    def without(self, removed: Tensor) -> float:
        """The cost once these classes are gone, counted as exactly as it can be."""


class Shares:
    """How much stays of some channels, as a mean of how much stays of every pool."""

    def __init__(self, structure: Structure) -> None:
        count = len(structure.pools)
        self._pool_of = torch.full((int(structure.classes.max()) + 1,), count)
        for number, pool in enumerate(structure.pools):
            self._pool_of[pool.units] = number
        self._structure, self._pools = structure, count
        self._known: dict[tuple[int, ...], int] = {}
        self._rows: list[Floats] = [np.eye(count + 1)[count]]  # number 0: all of it stays

    def number(self, field: Tensor) -> int:
        """Which of the shares a field of labels stands for."""
        key = (field.data_ptr(), field.numel(), *field.stride())
        if key not in self._known:
            pools = self._pool_of[self._structure.of(field.reshape(-1))].numpy()
            self._known[key] = len(self._rows)
            self._rows.append(np.bincount(pools, minlength=self._pools + 1) / field.numel())
        return self._known[key]

    def of(self, kept: Floats) -> Floats:
        """All shares by number, where so much of each pool stays: [pools] or [many, pools]."""
        whole = np.concatenate([kept, np.ones((*kept.shape[:-1], 1))], axis=-1)
        return np.asarray(whole @ np.stack(self._rows).T)


class Costs:
    """A sum of products; every factor is the share of some channels that stay."""

    def __init__(self, structure: Structure, measure: Literal["macs", "params"]) -> None:
        self._structure, self._shares = structure, Shares(structure)
        self._exact = structure.macs if measure == "macs" else structure.params
        terms = self._macs() if measure == "macs" else self._params()
        longest = max((len(factors) for _, factors in terms), default=0)
        padded = [[*factors, *[0] * (longest - len(factors))] for _, factors in terms]
        self._amounts = np.array([float(amount) for amount, _ in terms])
        self._factors = np.array(padded, dtype=np.int64).reshape(len(terms), longest)

    def at(self, kept: Floats) -> Floats:
        """Costs where these shares of each pool stay: [pools] or [many, pools]."""
        shares = self._shares.of(kept)
        return np.asarray(shares[..., self._factors].prod(axis=-1) @ self._amounts)

    def without(self, removed: Tensor) -> float:
        """The cost once these classes are gone, label by label."""
        return self._exact(self._structure.kept_labels(removed))

    def _macs(self) -> list[tuple[int, list[int]]]:
        terms = []
        for work in self._structure.seen.works:
            amount, factors = work.times, []
            for factor in work.factors:
                amount *= math.prod(factor.shape)
                factors += self._numbers(factor.fields)
            terms.append((amount, factors))
        return terms

    def _params(self) -> list[tuple[int, list[int]]]:
        return [
            (math.prod(slot.shape), self._numbers(slot.fields))
            for slot in self._structure.seen.slots.values()
            if slot.trainable
        ]

    def _numbers(self, fields: Fields | Sequence[Tensor]) -> list[int]:
        return [self._shares.number(field) for field in fields]
