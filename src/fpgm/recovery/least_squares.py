"""Ridge least squares in float64, accumulated batch by batch.

The unknown is a change of a layer's weights: the ridge pulls the change, not the weights, towards
zero. `NormalEquations` accumulates XᵀX and XᵀR, whose size does not depend on the number of rows.
`RowEquations` keeps the rows X themselves, for layers so wide that XᵀX would not fit into memory:
it then solves the equivalent problem with one unknown for each row.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fpgm.utils.distributed import ALONE, Ranks

if TYPE_CHECKING:
    from typing_extensions import Self

FLOAT32_FAN_IN, FLOAT32_ROWS = 384, 2048
"""Layers with at least this fan-in are multiplied in float32, in blocks of rows. The sums over
blocks are in float64, and rounding within a block, around its mean, is far below the smallest
useful ridge."""
RIDGE_GROWTH, MAX_RIDGE = 10.0, 1e6
"""Factor by which a ridge grows while the system is singular, and where that ends."""


class Equations(ABC):
    """Accumulated input rows of a layer, its target outputs, and their residuals, by group."""

    def __init__(
        self,
        groups: int,
        fan_in: int,
        outputs: int,
        device: torch.device,
        *,
        constant: bool = False,
    ) -> None:
        """Start empty; with `constant` there is one more column, of ones."""
        self.fan_in, self.constant = fan_in, constant
        self.shape = (groups, fan_in + constant, outputs)
        self.device = device
        self.target_sums = self._zeros(groups, outputs)
        self.target_squares = self._zeros(groups, outputs)
        self.squared_residual = 0.0
        self.count = 0

    def add(self, rows: Tensor, targets: Tensor, residuals: Tensor) -> None:
        """Add rows of a batch.

        Args:
            rows: input of the layer, [groups, positions, fan-in].
            targets: its target outputs there, [groups, positions, outputs].
            residuals: targets minus its current outputs.
        """
        self._accumulate(rows, residuals)
        self.target_sums += targets.sum(1)
        self.target_squares += targets.square().sum(1)
        self.squared_residual += float(residuals.square().sum())
        self.count += rows.shape[1]

    def target_variation(self) -> Tensor:
        """Sum the targets' squared deviations from their mean, over all rows: [groups, outputs]."""
        return (self.target_squares - self.target_sums.square() / self.count).clamp(min=0)

    def solve(self, ridge: float) -> tuple[Tensor, float]:
        """Solve for the best change; return it with the ridge that was used.

        Args:
            ridge: the initial ridge, as a multiple of the mean square of the inputs.
        """
        while ridge < MAX_RIDGE:
            system, size = self._build_system()
            system.diagonal(dim1=1, dim2=2).add_((ridge * size.clamp(min=1e-30))[:, None])
            factor, failed = torch.linalg.cholesky_ex(system)
            if not bool(failed.any()):
                return self._solve_with(factor), ridge
            ridge *= RIDGE_GROWTH
        return self._zeros(*self.shape), math.inf  # the inputs are not finite

    def merge(self, other: Self) -> Self:
        """Return the equations of both together."""
        both = copy.copy(self)
        for name in ("target_sums", "target_squares", "squared_residual", "count"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        both._merge_rows(self, other)
        return both

    def _sums(self, ranks: Ranks) -> list[Tensor]:
        """Return the tensors that are added up over ranks, in place."""
        return [self.target_sums, self.target_squares]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    @abstractmethod
    def error(self, change: Tensor) -> float:
        """Compute the squared error over all rows after a change."""

    @abstractmethod
    def output_variation(self, matrix: Tensor) -> Tensor:
        """Sum squared deviations, like `target_variation`, of the outputs with these weights."""

    @abstractmethod
    def _accumulate(self, rows: Tensor, residuals: Tensor) -> None:
        """Accumulate rows and residuals."""

    @abstractmethod
    def _merge_rows(self, one: Self, other: Self) -> None:
        """Merge the stored rows of both."""

    @abstractmethod
    def _build_system(self) -> tuple[Tensor, Tensor]:
        """Return the system without a ridge, as a new tensor, and its scale, by group."""

    @abstractmethod
    def _solve_with(self, factor: Tensor) -> Tensor:
        """Compute the change from the system's Cholesky factor."""


class NormalEquations(Equations):
    """XᵀX and XᵀR, summed over all rows, by group."""

    def __init__(
        self,
        groups: int,
        fan_in: int,
        outputs: int,
        device: torch.device,
        *,
        constant: bool = False,
    ) -> None:
        super().__init__(groups, fan_in, outputs, device, constant=constant)
        columns = self.shape[1]
        self.gram = self._zeros(groups, columns, columns)
        self.cross = self._zeros(*self.shape)
        self.row_sum = self._zeros(groups, fan_in)

    def _accumulate(self, rows: Tensor, residuals: Tensor) -> None:
        gram = self.gram[:, : self.fan_in, : self.fan_in]
        cross = self.cross[:, : self.fan_in]
        if self.fan_in < FLOAT32_FAN_IN or rows.dtype != torch.float32:
            rows = rows.double()
            gram.baddbmm_(rows.transpose(1, 2), rows)
            cross.baddbmm_(rows.transpose(1, 2), residuals)
        else:
            blocks = zip(rows.split(FLOAT32_ROWS, 1), residuals.split(FLOAT32_ROWS, 1), strict=True)
            for block, residual in blocks:
                # Around the mean: the squares of a large mean would round off what varies.
                mean = block.mean(1, keepdim=True)
                block = block - mean
                mean, sums = mean.double(), block.sum(1, keepdim=True, dtype=torch.float64)
                both = mean.transpose(1, 2) @ (sums + mean * block.shape[1] / 2)
                gram += (block.transpose(1, 2) @ block).double() + both + both.transpose(1, 2)
                cross += block.transpose(1, 2) @ residual.float()
                cross += mean.transpose(1, 2) @ residual.sum(1, keepdim=True)
        row_sum = rows.sum(1, dtype=torch.float64)
        self.row_sum += row_sum
        if self.constant:
            self.gram[:, self.fan_in, : self.fan_in] += row_sum
            self.gram[:, : self.fan_in, self.fan_in] += row_sum
            self.gram[:, self.fan_in, self.fan_in] += rows.shape[1]
            self.cross[:, self.fan_in] += residuals.sum(1)

    def _merge_rows(self, one: Self, other: Self) -> None:
        for name in ("gram", "cross", "row_sum"):
            setattr(self, name, getattr(one, name) + getattr(other, name))

    def _sums(self, ranks: Ranks) -> list[Tensor]:
        return [*super()._sums(ranks), self.gram, self.cross, self.row_sum]

    def error(self, change: Tensor) -> float:
        gain = 2 * (change * self.cross).sum() - (change * (self.gram @ change)).sum()
        left = self.squared_residual - float(gain)
        return left if math.isnan(left) else max(left, 0.0)

    def output_variation(self, matrix: Tensor) -> Tensor:
        gram = self.gram[:, : self.fan_in, : self.fan_in]
        sums = (self.row_sum[:, None] @ matrix)[:, 0]
        return ((matrix * (gram @ matrix)).sum(1) - sums.square() / self.count).clamp(min=0)

    def _build_system(self) -> tuple[Tensor, Tensor]:
        return self.gram.clone(), self.gram.diagonal(dim1=1, dim2=2).mean(1)

    def _solve_with(self, factor: Tensor) -> Tensor:
        change: Tensor = torch.cholesky_solve(self.cross, factor)
        return change


class RowEquations(Equations):
    """All rows X: one equation for each row, however wide it is, by group."""

    def __init__(
        self,
        groups: int,
        fan_in: int,
        outputs: int,
        device: torch.device,
        *,
        constant: bool = False,
    ) -> None:
        super().__init__(groups, fan_in, outputs, device, constant=constant)
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._products: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """All rows: [groups, rows, columns]."""
        return self._concatenate()[0]

    @property
    def residuals(self) -> Tensor:
        """The residual of each row: [groups, rows, outputs]."""
        return self._concatenate()[1]

    def _concatenate(self) -> tuple[Tensor, Tensor]:
        """Concatenate the parts that were added, once."""
        if len(self._parts) != 1:
            rows, residuals = zip(*self._parts, strict=True)
            self._parts = [(torch.cat(rows, 1), torch.cat(residuals, 1))]
        return self._parts[0]

    def _accumulate(self, rows: Tensor, residuals: Tensor) -> None:
        ones = rows.new_ones(*rows.shape[:2], int(self.constant))
        self._parts.append((torch.cat([rows, ones], 2).double(), residuals))
        self._products = None

    def _merge_rows(self, one: Self, other: Self) -> None:
        self._parts = [*one._parts, *other._parts]
        self._products = None

    def _sums(self, ranks: Ranks) -> list[Tensor]:
        """Give the rows of other ranks a place, with zeros."""
        counts = ranks.gather(self.count)
        groups, columns, outputs = self.shape
        rows, residuals = (self._zeros(groups, sum(counts), n) for n in (columns, outputs))
        own = slice(sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1]))
        if self.count:
            rows[:, own], residuals[:, own] = self._concatenate()
        self._parts = [(rows, residuals)]
        self._products = None
        return [*super()._sums(ranks), rows, residuals]

    def error(self, change: Tensor) -> float:
        return float((self.residuals - self.rows @ change).square().sum())

    def output_variation(self, matrix: Tensor) -> Tensor:
        out = self.rows[:, :, : self.fan_in] @ matrix
        variation: Tensor = (out - out.mean(1, keepdim=True)).square().sum(1)
        return variation

    def _build_system(self) -> tuple[Tensor, Tensor]:
        if self._products is None:
            self._products = self.rows @ self.rows.transpose(1, 2)
        return self._products.clone(), self.rows.square().sum(1).mean(1)

    def _solve_with(self, factor: Tensor) -> Tensor:
        change: Tensor = self.rows.transpose(1, 2) @ torch.cholesky_solve(self.residuals, factor)
        return change


def add_over_ranks_(parts: Sequence[Equations], ranks: Ranks) -> None:
    """Turn the equations of each rank's rows into those of all rows, with one all-reduce."""
    if ranks.size == 1:
        return
    tensors = [tensor for part in parts for tensor in part._sums(ranks)]
    scalars = torch.tensor(
        [[part.squared_residual, part.count] for part in parts], dtype=torch.float64
    )
    ranks.sum_(scalars, *tensors)
    for part, (squared_residual, count) in zip(parts, scalars.tolist(), strict=True):
        part.squared_residual, part.count = squared_residual, int(count)


def best_change(
    fit: Equations,
    held_out: Equations,
    both: Equations,
    ridges: Sequence[float],
    ranks: Ranks = ALONE,
) -> tuple[Tensor, float | None]:
    """Choose the ridge with the smallest held-out error, and solve all equations with it.

    Returns the change and the ridge; a change of zero and None if no ridge reduces the error. Ranks
    that have the same equations divide the ridges among them, and get the same change bit by bit.
    """
    tried = torch.zeros(len(ridges), dtype=torch.float64)
    for number, ridge in enumerate(ridges):
        if ranks.owns(number):
            tried[number] = held_out.error(fit.solve(ridge)[0])
    ranks.sum_(tried)
    errors = dict(zip(ridges, tried.tolist(), strict=True))
    best = min(errors, key=lambda ridge: errors[ridge])
    change, used = both.solve(best)
    strongest = torch.tensor(used, dtype=torch.float64)
    ranks.copy_from_first_([change, strongest])
    improves = errors[best] < held_out.squared_residual
    return (change, float(strongest)) if improves else (torch.zeros_like(change), None)
