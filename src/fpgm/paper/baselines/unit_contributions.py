"""What each unit adds to what is computed from it, and how those additions go together.

The output of a layer is a sum over the channels it reads. ThiNet and CP both choose channels by how
well some of these summands stand for their sum; all they need to know of the data are the products
of summands, added up over inputs, positions and output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpgm.paper.baselines.base import Task
from fpgm.planning.planner import Planner
from fpgm.recovery.sensitivity.probes import Measured, Reader, measure
from fpgm.tracing.grouping import Pool
from fpgm.utils.preserve_state import undisturbed


def look(task: Task, planner: Planner) -> Measured:
    """How what layers read varies together, over the task's inputs."""
    inputs = task.inputs()
    try:
        with undisturbed(planner.model):
            planner.model.eval()
            return measure(planner.model, (), inputs, task.progress)
    finally:
        inputs.close()


def known_products(task: Task, planner: Planner) -> list[tuple[Tensor, Tensor]]:
    """Units of every pool that some layer is known to read, and their products.

    Others (what branches add to streams of full width) stay whole, as in both papers; the rest
    loses the more.
    """
    seen = look(task, planner)
    found: list[tuple[Tensor, Tensor]] = []
    for pool in list(planner.structure.pools):
        together = products(planner, pool, seen)
        if together is None:
            planner.structure.freeze(pool.units, "no layer reads what it gives by itself")
        else:
            found.append((pool.units, together))
    return found


def products(planner: Planner, pool: Pool, seen: Measured) -> Tensor | None:
    """[units, units]: products of what a pool's units add to all layers that read them.

    None if no layer is known to read them.
    """
    total = torch.zeros(len(pool.units), len(pool.units), dtype=torch.float64)
    known = False
    for layer, places in planner.structure.readers(pool.units):
        reader = seen.readers.get(layer)
        if reader is None or not reader.whole:
            continue
        known = True
        owners = reader.columns(places)  # [groups, reads]
        for own, together in zip(owners, _weighted(reader), strict=True):
            mine = (own >= 0).nonzero().squeeze(1)
            part = together[mine][:, mine]
            rows = torch.zeros(len(pool.units), len(mine), dtype=torch.float64)
            rows[own[mine], torch.arange(len(mine))] = 1
            total += rows @ part @ rows.T
    return total if known else None


def _weighted(reader: Reader) -> Tensor:
    """[groups, reads, reads]: products of what single weights add, over all output channels."""
    reads = reader.matrix.shape[1]
    together: Tensor = reader.matrix @ reader.matrix.transpose(1, 2)
    return (reader.gram[:, :reads, :reads] * together).cpu()
