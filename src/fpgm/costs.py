"""MACs and parameters as a formula of how much of every pool stays, fast enough to search with.

Exact where every unit of a pool has as many channels as the others in each tensor it runs through;
what is chosen by it is counted exactly afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fpgm.coupling import Structure
from fpgm.labels import Fields

Floats = npt.NDArray[np.float64]
Measure = Literal["macs", "params"]


class Costs:
    """A sum of products; every factor is the share of some channels that stay."""

    def __init__(self, structure: Structure, measure: Measure) -> None:
        count = len(structure.pools)
        self._pool_of = torch.full((int(structure.classes.max()) + 1,), count)
        for number, pool in enumerate(structure.pools):
            self._pool_of[pool.units] = number
        self._structure, self._pools = structure, count
        self._known: dict[tuple[int, ...], int] = {}
        self._shares: list[Floats] = [np.eye(count + 1)[count]]  # a factor of one, for padding
        terms = self._macs() if measure == "macs" else self._params()
        longest = max((len(factors) for _, factors in terms), default=0)
        padded = [[*factors, *[0] * (longest - len(factors))] for _, factors in terms]
        self._amounts = np.array([float(amount) for amount, _ in terms])
        self._factors = np.array(padded, dtype=np.int64).reshape(len(terms), longest)
        self._rows = np.stack(self._shares)

    def at(self, kept: Floats) -> Floats:
        """Costs where these shares of each pool stay: [pools] or [many, pools]."""
        whole = np.concatenate([kept, np.ones((*kept.shape[:-1], 1))], axis=-1)
        shares = whole @ self._rows.T
        return np.asarray(shares[..., self._factors].prod(axis=-1) @ self._amounts)

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
        """Which share of channels each field stands for."""
        found = []
        for f in fields:
            key = (f.data_ptr(), f.numel(), *f.stride())
            if key not in self._known:
                pools = self._pool_of[self._structure.of(f.reshape(-1))].numpy()
                self._known[key] = len(self._shares)
                self._shares.append(np.bincount(pools, minlength=self._pools + 1) / f.numel())
            found.append(self._known[key])
        return found
