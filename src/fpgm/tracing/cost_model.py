"""A model's cost as a formula of the kept fraction of every group, fast enough to search with.

For MACs and parameters it is exact where all units of a group have equally many channels in each
tensor; the selected plan is counted exactly afterwards.
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
    """A cost that a budget limits."""

    def at(self, kept: Floats) -> Floats:
        """Return costs for the kept fraction of each group: [groups] or [many, groups]."""

    def without(self, removed: Tensor) -> float:
        """Return the cost without these classes, as exactly as possible."""


class KeptFractions:
    """The kept fraction of some channels, as a mean of the kept fractions of the groups."""

    def __init__(self, structure: Structure) -> None:
        count = len(structure.groups)
        self._group_of = torch.full((int(structure.classes.max()) + 1,), count)
        for number, group in enumerate(structure.groups):
            self._group_of[group.units] = number
        self._structure, self._groups = structure, count
        self._known: dict[tuple[int, ...], int] = {}
        self._rows: list[Floats] = [np.eye(count + 1)[count]]  # number 0: everything is kept

    def number(self, field: Tensor) -> int:
        """Return the number of a field's kept fraction."""
        key = (field.data_ptr(), field.numel(), *field.stride())
        if key not in self._known:
            groups = self._group_of[self._structure.classes_of(field.reshape(-1))].numpy()
            self._known[key] = len(self._rows)
            self._rows.append(np.bincount(groups, minlength=self._groups + 1) / field.numel())
        return self._known[key]

    def fractions(self, kept: Floats) -> Floats:
        """Return all kept fractions by number, given each group's: [groups] or [many, groups]."""
        whole = np.concatenate([kept, np.ones((*kept.shape[:-1], 1))], axis=-1)
        return np.asarray(whole @ np.stack(self._rows).T)


class Costs:
    """A sum of products; every factor is the kept fraction of some channels."""

    def __init__(self, structure: Structure, measure: Literal["macs", "params"]) -> None:
        self._structure, self._kept_fractions = structure, KeptFractions(structure)
        self._exact = structure.macs if measure == "macs" else structure.params
        terms = self._macs() if measure == "macs" else self._params()
        longest = max((len(factors) for _, factors in terms), default=0)
        padded = [[*factors, *[0] * (longest - len(factors))] for _, factors in terms]
        self._amounts = np.array([float(amount) for amount, _ in terms])
        self._factors = np.array(padded, dtype=np.int64).reshape(len(terms), longest)

    def at(self, kept: Floats) -> Floats:
        """Return costs for the kept fraction of each group: [groups] or [many, groups]."""
        fractions = self._kept_fractions.fractions(kept)
        return np.asarray(fractions[..., self._factors].prod(axis=-1) @ self._amounts)

    def without(self, removed: Tensor) -> float:
        """Return the cost without these classes, counted label by label."""
        return self._exact(self._structure.kept_labels(removed))

    def _macs(self) -> list[tuple[int, list[int]]]:
        terms = []
        for op_cost in self._structure.trace.op_costs:
            amount, factors = op_cost.times, []
            for factor in op_cost.factors:
                amount *= math.prod(factor.shape)
                factors += self._numbers(factor.fields)
            terms.append((amount, factors))
        return terms

    def _params(self) -> list[tuple[int, list[int]]]:
        return [
            (math.prod(info.shape), self._numbers(info.fields))
            for info in self._structure.trace.parameter_infos.values()
            if info.trainable
        ]

    def _numbers(self, fields: Fields | Sequence[Tensor]) -> list[int]:
        return [self._kept_fractions.number(field) for field in fields]
