"""Ridge least squares by normal equations in float64, fed a batch at a time.

What is sought is a change of the weights, small where the data do not ask for one: the ridge draws
the change, not the weights, to zero. Memory depends on the layer, never on how much is fed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

STRONGER, STRONGEST = 10.0, 1e6
"""By how much a ridge grows while the equations cannot be solved, and how far."""


class Normal:
    """Sums of products over everything seen, one system a group."""

    def __init__(
        self, groups: int, reads: int, writes: int, device: torch.device, *, constant: bool = False
    ) -> None:
        """With a `constant` there is one more column, of ones."""
        columns = reads + constant

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.gram = zeros(groups, columns, columns)
        self.cross = zeros(groups, columns, writes)
        self.read = zeros(groups, reads)
        self.reads, self.constant = reads, constant
        self.sums, self.squares = zeros(groups, writes), zeros(groups, writes)
        self.missed = 0.0
        self.count = 0

    def add(self, rows: Tensor, wanted: Tensor, missing: Tensor) -> None:
        """Rows [groups, positions, reads], what is wanted there, and what is missing of it."""
        self.gram[:, : self.reads, : self.reads].baddbmm_(rows.transpose(1, 2), rows)
        self.cross[:, : self.reads].baddbmm_(rows.transpose(1, 2), missing)
        read = rows.sum(1)
        self.read += read
        if self.constant:
            self.gram[:, self.reads, : self.reads] += read
            self.gram[:, : self.reads, self.reads] += read
            self.gram[:, self.reads, self.reads] += rows.shape[1]
            self.cross[:, self.reads] += missing.sum(1)
        self.sums += wanted.sum(1)
        self.squares += wanted.square().sum(1)
        self.missed += float(missing.square().sum())
        self.count += rows.shape[1]

    def join(self, other: Normal) -> Normal:
        """Both together."""
        groups, _, writes = self.cross.shape
        both = Normal(groups, self.reads, writes, self.cross.device, constant=self.constant)
        for name in ("gram", "cross", "read", "sums", "squares", "missed", "count"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def error(self, change: Tensor) -> float:
        """The squared error over everything seen that a change leaves."""
        gained = 2 * (change * self.cross).sum() - (change * (self.gram @ change)).sum()
        left = self.missed - float(gained)
        return left if math.isnan(left) else max(left, 0.0)

    def spread(self) -> Tensor:
        """How much what is wanted varies, over everything seen: [groups, writes]."""
        return (self.squares - self.sums.square() / self.count).clamp(min=0)

    def variance(self, matrix: Tensor) -> Tensor:
        """How much what these weights write would vary, over everything seen: [groups, writes]."""
        gram = self.gram[:, : self.reads, : self.reads]
        sums = (self.read[:, None] @ matrix)[:, 0]
        return ((matrix * (gram @ matrix)).sum(1) - sums.square() / self.count).clamp(min=0)

    def solve(self, ridge: float) -> tuple[Tensor, float]:
        """The best change, and the ridge it took: a multiple of the mean square of what is read."""
        size = self.gram.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)
        while ridge < STRONGEST:
            system = self.gram.clone()
            system.diagonal(dim1=1, dim2=2).add_((ridge * size)[:, None])
            factor, failed = torch.linalg.cholesky_ex(system)
            if not bool(failed.any()):
                return torch.cholesky_solve(self.cross, factor), ridge
            ridge *= STRONGER
        return torch.zeros_like(self.cross), math.inf  # what was read is not finite


def best_change(fit: Normal, held: Normal, ridges: Sequence[float]) -> tuple[Tensor, float | None]:
    """The change that serves best where it was not fitted, with its ridge; none if none serves."""
    errors = {ridge: held.error(fit.solve(ridge)[0]) for ridge in ridges}
    best = min(errors, key=lambda ridge: errors[ridge])
    if not errors[best] < held.missed:
        return torch.zeros_like(fit.cross), None
    both = fit if held is fit else fit.join(held)
    return both.solve(best)
