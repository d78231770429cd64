"""Carry labels through the adapters of an earlier plan.

A scatter places channels among zeros: those channels may be removed, but the width of its output
does not change. Channels that a gather picks are removed together with the channels it picks from,
or, if a scatter placed those, with the placed channels. The tracer decides what to do with these
relations.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fpgm.tracing import labels as lb
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.modules import module_at

if TYPE_CHECKING:
    from fpgm.tracing.tracer import Tracer


@dataclass(frozen=True)
class PlacedLabels:
    """What a scatter placed among zeros, and the labels of those channels."""

    adapter: Adapter
    labels: Tensor

    def at(self, positions: Sequence[int]) -> Tensor | None:
        """Return the labels at some positions, if there is a channel at each of them."""
        where = {position: number for number, position in enumerate(self.adapter.index)}
        if not len(self.labels) or not all(position in where for position in positions):
            return None
        return self.labels[torch.tensor([where[position] for position in positions])]


@dataclass
class PlacedTensors:
    """Live tensors and module inputs that hold placed channels and zeros elsewhere."""

    tensors: MutableMapping[Tensor, PlacedLabels] = field(default_factory=WeakIdKeyDictionary)
    inputs: dict[str, PlacedLabels] = field(default_factory=dict)

    def pass_on(self, x: Tensor, out: Tensor) -> None:
        """Note that `out` holds the same channels at the same positions as `x`."""
        if self.tensors and out is not x and x in self.tensors:
            self.tensors[out] = self.tensors[x]

    def forget(self, x: Tensor) -> None:
        """Note that `x` was overwritten."""
        self.tensors.pop(x, None)


def carry(tracer: Tracer, adapter: Adapter, x: Tensor, out: Tensor) -> None:
    """Label what an adapter returns."""
    dim = adapter.dim
    fields = tracer.fields(x)
    rows = [f for f in fields if f.shape[dim] > 1]
    row = rows[0].reshape(-1) if len(rows) == 1 and lb.axes(rows[0]) == [dim] else None
    if rows and row is None:
        tracer.freeze(rows, "an adapter moves channels that lie along several axes")
    if adapter.kind == "scatter":
        labels, new = tracer.place(adapter, row, tracer.is_zero(x))
        tracer.placed.tensors[out] = placed = PlacedLabels(adapter, labels)
        if adapter.side == "input":
            tracer.placed.inputs[adapter.module] = placed
    else:
        new = _pick_labels(tracer, adapter, x, row)
    rest = [f for f in fields if f.shape[dim] == 1]
    tracer.set(out, [*rest, lb.along(new, out.ndim, dim)] if len(new) else rest)
    tracer.mark_zero(out, tracer.is_zero(x))


def _pick_labels(tracer: Tracer, adapter: Adapter, x: Tensor, row: Tensor | None) -> Tensor:
    """Return the labels of what a gather picks."""
    placed = _labels_placed_in(tracer, adapter, x)
    labels = None if placed is None else placed.at(adapter.index)
    if labels is None and row is not None:
        return tracer.pick(adapter, row[torch.tensor(adapter.index)], row)
    return tracer.pick(adapter, labels, None)


def _labels_placed_in(tracer: Tracer, adapter: Adapter, x: Tensor) -> PlacedLabels | None:
    """Return what was placed among the zeros that a gather picks from.

    A convolution along the channels (ECA) keeps every channel at its position, so what was placed
    before it is picked after it.
    """
    before = tracer.placed.inputs.get(adapter.module)
    if before is None or adapter.side == "input":
        return tracer.placed.tensors.get(x)
    along = isinstance(module_at(tracer.model, adapter.module), nn.modules.conv._ConvNd)
    same = (before.adapter.dim, before.adapter.index) == (adapter.dim, adapter.index)
    return before if along and same else None
