"""What removing more and more of a pool does to the outputs, after its readers are solved anew.

If units go one after another, the least error each reader can be left with follows for all numbers
of units from one factorisation. Let A = L Lᵀ be how the reader's inputs vary together, with what
goes first in the last places. Without the inputs in the places S at the end, the weights W of those
leave an error of Wₛᵀ Lₛ Lₛᵀ Wₛ, and the rows of LᵀW in S are the rows of LₛᵀWₛ: a running sum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fpgm.errors import RequestError
from fpgm.recovery.sensitivity.probes import Measured, Reader
from fpgm.tracing.grouping import Structure

Floats = npt.NDArray[np.float64]

RIDGE = 1e-4
"""In units of what a layer reads, as in recovery."""


def harm(structure: Structure, order: Tensor, measured: Measured) -> Floats | None:
    """Share of the outputs' squares lost when the first 0, 1, … units in this order go.

    None if nothing that was measured reads the units or hands them to a stream.
    """
    total = np.zeros(len(order) + 1)
    touched = False
    for layer, places in structure.readers(order):
        if layer in measured.readers:
            total += _reading(measured.readers[layer], places, len(order))
            touched = True
    for site in structure.seen.sites:
        branch = measured.branches.get(site.module)
        places = structure.places(order, site.labels)
        if branch is not None and bool((places >= 0).any()):
            total += _summed(branch.variance * branch.gain, places, len(order))
            touched = True
    return total if touched else None


def _reading(reader: Reader, places: Tensor, units: int) -> Floats:
    """What a reader loses; `places` say when each channel it reads goes, −1: never."""
    gains = reader.gain.reshape(len(reader.matrix), -1)
    when = reader.columns(places)
    total = np.zeros(units + 1)
    for matrix, gram, gain, columns in zip(reader.matrix, reader.gram, gains, when, strict=True):
        if not reader.whole:  # as if what it reads varied independently
            total += _summed(gram * (matrix.square() @ gain), columns, units)
            continue
        if len(gram) > len(matrix):  # a constant, which stays
            columns = torch.cat([columns, columns.new_tensor([-1])])
            matrix = torch.cat([matrix, matrix.new_zeros(1, matrix.shape[1])])
        # What goes first comes last, what never goes first of all.
        order = torch.where(columns < 0, units, columns).argsort(descending=True, stable=True)
        system = gram[order][:, order]
        lost = (factor(system).T @ (matrix[order] * gain.sqrt())).square().sum(1)
        total += _summed(lost, columns[order], units)
    return total


def factor(system: Tensor) -> Tensor:
    """Its Cholesky factor, with as little added to the diagonal as makes it have one."""
    size = system.diagonal().mean().clamp(min=1e-30)
    ridge = RIDGE
    found: Tensor
    while ridge < 1:
        raised = system.clone()
        raised.diagonal().add_(ridge * size)
        found, failed = torch.linalg.cholesky_ex(raised)
        if not int(failed):
            return found
        ridge *= 10
    raise RequestError("What a layer reads is not finite: look at the data for NaN and infinity.")


def _summed(lost: Tensor, places: Tensor, units: int) -> Floats:
    """Running sums over places; what has none never goes."""
    goes = places >= 0
    each = torch.zeros(units, dtype=torch.float64)
    each.index_add_(0, places[goes], lost.double().cpu()[goes])
    return np.concatenate([[0.0], each.cumsum(0).numpy()])
