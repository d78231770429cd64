"""Gram matrices of the contributions of input channels to a layer's output.

The output of a layer is a sum over its input channels. ThiNet and CP choose channels by how well
some of these summands approximate the sum. All they need from the data are the inner products of
the summands, over inputs, positions and output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpgm.paper.baselines.base import Task
from fpgm.planning.planner import Planner
from fpgm.recovery.sensitivity.probes import (
    ConsumerStatistics,
    ModelStatistics,
    collect_statistics,
)
from fpgm.tracing.grouping import ChannelGroup
from fpgm.utils.preserve_state import preserve_state


def measure_consumers(task: Task, planner: Planner) -> ModelStatistics:
    """Measure the second moments of all layers' inputs over the task's calibration data."""
    inputs = task.inputs()
    try:
        with preserve_state(planner.model):
            planner.model.eval()
            return collect_statistics(planner.model, (), inputs, task.progress)
    finally:
        inputs.close()


def contribution_products(task: Task, planner: Planner) -> list[tuple[Tensor, Tensor]]:
    """Compute the Gram matrix of each group whose units are consumed by a layer directly.

    Returns (units, Gram matrix) pairs. Other groups (branches that are added to residual streams of
    full width) are frozen, as in both papers; the remaining groups lose more units.
    """
    measured = measure_consumers(task, planner)
    products: list[tuple[Tensor, Tensor]] = []
    for group in list(planner.structure.groups):
        gram = group_products(planner, group, measured)
        if gram is None:
            planner.structure.freeze(group.units, "no layer consumes its output directly")
        else:
            products.append((group.units, gram))
    return products


def group_products(
    planner: Planner, group: ChannelGroup, measured: ModelStatistics
) -> Tensor | None:
    """Compute the inner products [units, units] of a group's contributions to its consumers.

    Returns None if no layer is known to consume them.
    """
    total = torch.zeros(len(group.units), len(group.units), dtype=torch.float64)
    is_consumed = False
    for layer, places in planner.structure.consumers(group.units):
        consumer = measured.consumers.get(layer)
        if consumer is None or not consumer.has_full_gram:
            continue
        is_consumed = True
        owners = consumer.columns(places)  # [groups, reads]
        for owner, gram in zip(owners, _weighted_gram(consumer), strict=True):
            selected = (owner >= 0).nonzero().squeeze(1)
            part = gram[selected][:, selected]
            rows = torch.zeros(len(group.units), len(selected), dtype=torch.float64)
            rows[owner[selected], torch.arange(len(selected))] = 1
            total += rows @ part @ rows.T
    return total if is_consumed else None


def _weighted_gram(consumer: ConsumerStatistics) -> Tensor:
    """Compute the products [groups, inputs, inputs] of weighted inputs, over output channels."""
    reads = consumer.matrix.shape[1]
    weight_gram: Tensor = consumer.matrix @ consumer.matrix.transpose(1, 2)
    return (consumer.gram[:, :reads, :reads] * weight_gram).cpu()
