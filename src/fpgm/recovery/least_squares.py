"""Ridge least squares in float64, fed a batch at a time.

What is sought is a change of the weights, small where the data do not ask for one: the ridge draws
the change, not the weights, to zero. `Normal` sums up normal equations, whose size depends on the
layer and never on how much is fed. `Few` keeps the rows themselves, for layers so wide that their
normal equations would not fit: a few rows then say all there is to know, and the same change is
found among their mixtures.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

STRONGER, STRONGEST = 10.0, 1e6
"""By how much a ridge grows while the equations cannot be solved, and how far."""


class Equations(ABC):
    """What is known of a layer's rows, of what is wanted there, and of what is missing of it."""

    def __init__(
        self, groups: int, reads: int, writes: int, device: torch.device, *, constant: bool = False
    ) -> None:
        """With a `constant` there is one more column, of ones."""
        self.reads, self.constant = reads, constant
        self.shape = (groups, reads + constant, writes)
        self.device = device
        self.sums, self.squares = self._zeros(groups, writes), self._zeros(groups, writes)
        self.missed = 0.0
        self.count = 0

    def add(self, rows: Tensor, wanted: Tensor, missing: Tensor) -> None:
        """Rows [groups, positions, reads], what is wanted there, and what is missing of it."""
        self._take(rows, missing)
        self.sums += wanted.sum(1)
        self.squares += wanted.square().sum(1)
        self.missed += float(missing.square().sum())
        self.count += rows.shape[1]

    def spread(self) -> Tensor:
        """How much what is wanted varies, over everything seen: [groups, writes]."""
        return (self.squares - self.sums.square() / self.count).clamp(min=0)

    def solve(self, ridge: float) -> tuple[Tensor, float]:
        """The best change, and the ridge it took: a multiple of the mean square of what is read."""
        while ridge < STRONGEST:
            system, size = self._system()
            system.diagonal(dim1=1, dim2=2).add_((ridge * size.clamp(min=1e-30))[:, None])
            factor, failed = torch.linalg.cholesky_ex(system)
            if not bool(failed.any()):
                return self._solution(factor), ridge
            ridge *= STRONGER
        return self._zeros(*self.shape), math.inf  # what was read is not finite

    def join(self, other: Self) -> Self:
        """Both together."""
        both = copy.copy(self)
        for name in ("sums", "squares", "missed", "count"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        both._join(self, other)
        return both

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    @abstractmethod
    def error(self, change: Tensor) -> float:
        """The squared error over everything seen that a change leaves."""

    @abstractmethod
    def variance(self, matrix: Tensor) -> Tensor:
        """How much what these weights write would vary, over everything seen: [groups, writes]."""

    @abstractmethod
    def _take(self, rows: Tensor, missing: Tensor) -> None:
        """Add rows to what is kept of them."""

    @abstractmethod
    def _join(self, one: Self, other: Self) -> None:
        """Become what is kept of both."""

    @abstractmethod
    def _system(self) -> tuple[Tensor, Tensor]:
        """The equations without a ridge, newly made, and the mean square of a column, by group."""

    @abstractmethod
    def _solution(self, factor: Tensor) -> Tensor:
        """The change, from the equations' Cholesky factor."""


class Normal(Equations):
    """Sums of products over everything seen, one system a group."""

    def __init__(
        self, groups: int, reads: int, writes: int, device: torch.device, *, constant: bool = False
    ) -> None:
        super().__init__(groups, reads, writes, device, constant=constant)
        columns = self.shape[1]
        self.gram = self._zeros(groups, columns, columns)
        self.cross = self._zeros(*self.shape)
        self.read = self._zeros(groups, reads)

    def _take(self, rows: Tensor, missing: Tensor) -> None:
        self.gram[:, : self.reads, : self.reads].baddbmm_(rows.transpose(1, 2), rows)
        self.cross[:, : self.reads].baddbmm_(rows.transpose(1, 2), missing)
        read = rows.sum(1)
        self.read += read
        if self.constant:
            self.gram[:, self.reads, : self.reads] += read
            self.gram[:, : self.reads, self.reads] += read
            self.gram[:, self.reads, self.reads] += rows.shape[1]
            self.cross[:, self.reads] += missing.sum(1)

    def _join(self, one: Self, other: Self) -> None:
        for name in ("gram", "cross", "read"):
            setattr(self, name, getattr(one, name) + getattr(other, name))

    def error(self, change: Tensor) -> float:
        gained = 2 * (change * self.cross).sum() - (change * (self.gram @ change)).sum()
        left = self.missed - float(gained)
        return left if math.isnan(left) else max(left, 0.0)

    def variance(self, matrix: Tensor) -> Tensor:
        gram = self.gram[:, : self.reads, : self.reads]
        sums = (self.read[:, None] @ matrix)[:, 0]
        return ((matrix * (gram @ matrix)).sum(1) - sums.square() / self.count).clamp(min=0)

    def _system(self) -> tuple[Tensor, Tensor]:
        return self.gram.clone(), self.gram.diagonal(dim1=1, dim2=2).mean(1)

    def _solution(self, factor: Tensor) -> Tensor:
        found: Tensor = torch.cholesky_solve(self.cross, factor)
        return found


class Few(Equations):
    """The rows themselves, one system a group: as many equations as rows, however wide they are."""

    def __init__(
        self, groups: int, reads: int, writes: int, device: torch.device, *, constant: bool = False
    ) -> None:
        super().__init__(groups, reads, writes, device, constant=constant)
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._products: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """All of them: [groups, rows, columns]."""
        return self._whole()[0]

    @property
    def missing(self) -> Tensor:
        """At each of them: [groups, rows, writes]."""
        return self._whole()[1]

    def _whole(self) -> tuple[Tensor, Tensor]:
        """What came in parts, put together once."""
        if len(self._parts) != 1:
            rows, missing = zip(*self._parts, strict=True)
            self._parts = [(torch.cat(rows, 1), torch.cat(missing, 1))]
        return self._parts[0]

    def _take(self, rows: Tensor, missing: Tensor) -> None:
        ones = rows.new_ones(*rows.shape[:2], int(self.constant))
        self._parts.append((torch.cat([rows, ones], 2), missing))
        self._products = None

    def _join(self, one: Self, other: Self) -> None:
        self._parts = [*one._parts, *other._parts]
        self._products = None

    def error(self, change: Tensor) -> float:
        return float((self.missing - self.rows @ change).square().sum())

    def variance(self, matrix: Tensor) -> Tensor:
        written = self.rows[:, :, : self.reads] @ matrix
        varies: Tensor = (written - written.mean(1, keepdim=True)).square().sum(1)
        return varies

    def _system(self) -> tuple[Tensor, Tensor]:
        if self._products is None:
            self._products = self.rows @ self.rows.transpose(1, 2)
        return self._products.clone(), self.rows.square().sum(1).mean(1)

    def _solution(self, factor: Tensor) -> Tensor:
        found: Tensor = self.rows.transpose(1, 2) @ torch.cholesky_solve(self.missing, factor)
        return found


def best_change(
    fit: Equations, held: Equations, both: Equations, ridges: Sequence[float]
) -> tuple[Tensor, float | None]:
    """The change that serves best where it was not fitted, with its ridge; none if none serves."""
    errors = {ridge: held.error(fit.solve(ridge)[0]) for ridge in ridges}
    best = min(errors, key=lambda ridge: errors[ridge])
    change, ridge = both.solve(best)
    return (change, ridge) if errors[best] < held.missed else (torch.zeros_like(change), None)
