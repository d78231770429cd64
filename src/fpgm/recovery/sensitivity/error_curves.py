"""Estimate the output error of removing 1, 2, … units of a group, after its consumers are solved.

If units are removed in a fixed order, one factorization gives the smallest error of a consumer for
every number of removed units. Let A = L Lᵀ be the Gram matrix of the consumer's inputs, with the
inputs that are removed first in the last places. Removing the last inputs S with weights Wₛ leaves
the error Wₛᵀ Lₛ Lₛᵀ Wₛ, and the rows S of LᵀW are the rows of LₛᵀWₛ: the error is a cumulative sum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fpgm.errors import RequestError
from fpgm.recovery.sensitivity.probes import ConsumerStatistics, ModelStatistics
from fpgm.tracing.grouping import Structure

Floats = npt.NDArray[np.float64]


def error_curve(structure: Structure, order: Tensor, statistics: ModelStatistics) -> Floats | None:
    """Estimate the relative output error without the first 0, 1, … units of this order.

    None if no measured layer consumes the units and no measured branch adds them to a stream.
    """
    total = np.zeros(len(order) + 1)
    measured = False
    for layer, places in structure.consumers(order):
        if layer in statistics.consumers:
            total += _consumer_error(statistics.consumers[layer], places, len(order))
            measured = True
    for point in structure.trace.insertion_points:
        branch = statistics.branches.get(point.module)
        places = structure.places(order, point.labels)
        if branch is not None and bool((places >= 0).any()):
            total += _accumulate(branch.variance * branch.gain, places, len(order))
            measured = True
    return total if measured else None


def _consumer_error(consumer: ConsumerStatistics, places: Tensor, units: int) -> Floats:
    """Estimate the error of one consumer.

    Args:
        consumer: the layer.
        places: for each of its input channels, when it is removed; −1: never.
        units: how many units can be removed.
    """
    gains = consumer.gain.reshape(len(consumer.matrix), -1)
    by_group = consumer.columns(places)
    total = np.zeros(units + 1)
    for matrix, gram, gain, columns in zip(
        consumer.matrix, consumer.gram, gains, by_group, strict=True
    ):
        if not consumer.has_full_gram:  # as if its inputs were independent
            total += _accumulate(gram * (matrix.square() @ gain), columns, units)
            continue
        if len(gram) > len(matrix):  # the constant is never removed
            columns = torch.cat([columns, columns.new_tensor([-1])])
            matrix = torch.cat([matrix, matrix.new_zeros(1, matrix.shape[1])])
        # Inputs that are removed first come last, and those that are never removed come first.
        order = torch.where(columns < 0, units, columns).argsort(descending=True, stable=True)
        system = gram[order][:, order]
        errors = (
            (cholesky(system, consumer.ridge).T @ (matrix[order] * gain.sqrt())).square().sum(1)
        )
        total += _accumulate(errors, columns[order], units)
    return total


def cholesky(system: Tensor, ridge: float) -> Tensor:
    """Factorize a system with this ridge, or the next larger that makes it positive definite."""
    size = system.diagonal().mean().clamp(min=1e-30)
    factor: Tensor
    while ridge < 1:
        regularized = system.clone()
        regularized.diagonal().add_(ridge * size)
        factor, failed = torch.linalg.cholesky_ex(regularized)
        if not int(failed):
            return factor
        ridge *= 10
    raise RequestError("A layer's inputs are not finite: check the data for NaN and infinity.")


def _accumulate(errors: Tensor, places: Tensor, units: int) -> Floats:
    """Sum the errors of all places up to each one; those at −1 are left out."""
    is_removed = places >= 0
    by_place = torch.zeros(units, dtype=torch.float64)
    by_place.index_add_(0, places[is_removed], errors.double().cpu()[is_removed])
    return np.concatenate([[0.0], by_place.cumsum(0).numpy()])
