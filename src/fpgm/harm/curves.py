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

from fpgm.coupling import Pool, Structure, rows_of
from fpgm.errors import RequestError
from fpgm.harm.measure import Measured, Reader

Floats = npt.NDArray[np.float64]

RIDGE = 1e-4
"""In units of what a layer reads, as in recovery."""


def harm(structure: Structure, pool: Pool, order: Tensor, measured: Measured) -> Floats | None:
    """Share of the outputs' squares lost when the first 0, 1, … units in this order go.

    None if nothing that was measured reads the pool or is written by it.
    """
    rank = torch.full((int(structure.classes.max()) + 1,), len(order))
    rank[order] = torch.arange(len(order))
    total = np.zeros(len(order) + 1)
    touched = False
    for slot in structure.seen.slots.values():
        layer, _, kind = slot.name.rpartition(".")
        reader = measured.readers.get(layer)
        if reader is None or kind != "weight":
            continue
        for f, role in zip(slot.fields, slot.roles, strict=True):
            ranks = rank[structure.of(rows_of(f))]
            if role == "reads" and bool((ranks < len(order)).any()):
                total += _reading(reader, ranks, len(order))
                touched = True
    for site in structure.seen.sites:
        branch = measured.branches.get(site.module)
        ranks = rank[structure.of(site.labels)]
        if branch is not None and bool((ranks < len(order)).any()):
            total += _summed(branch.variance * branch.gain, ranks, len(order))
            touched = True
    return total if touched else None


def _reading(reader: Reader, ranks: Tensor, units: int) -> Floats:
    """What a reader loses, of which these are the ranks of the channels it reads."""
    groups, reads, _ = reader.matrix.shape
    whole = len(ranks) == reader.channels
    by_group = ranks.reshape(groups, -1) if whole else ranks.expand(groups, -1)
    kernel = reads // by_group.shape[1]
    gains = reader.gain.reshape(groups, -1)
    total = np.zeros(units + 1)
    for matrix, gram, gain, own in zip(reader.matrix, reader.gram, gains, by_group, strict=True):
        columns = torch.cat([own.repeat_interleave(kernel), own.new_tensor([units])])
        order = columns.argsort(descending=True, stable=True)  # what goes first comes last
        system = gram[order][:, order]
        weights = torch.cat([matrix, matrix.new_zeros(1, matrix.shape[1])])[order] * gain.sqrt()
        factor = _factor(system)
        lost = (factor.T @ weights).square().sum(1)
        total += _summed(lost, columns[order], units)
    return total


def _factor(system: Tensor) -> Tensor:
    """Its Cholesky factor, with as little added to the diagonal as makes it have one."""
    size = system.diagonal().mean().clamp(min=1e-30)
    ridge = RIDGE
    factor: Tensor
    while ridge < 1:
        raised = system + torch.eye(len(system), dtype=system.dtype) * (ridge * size)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not int(failed):
            return factor
        ridge *= 10
    raise RequestError("What a layer reads is not finite: look at the data for NaN and infinity.")


def _summed(lost: Tensor, ranks: Tensor, units: int) -> Floats:
    """Running sums over ranks; what has no rank never goes."""
    each = torch.zeros(units + 1, dtype=torch.float64)
    each.index_add_(0, ranks, lost.double().cpu())
    return np.concatenate([[0.0], each[:units].cumsum(0).numpy()])
