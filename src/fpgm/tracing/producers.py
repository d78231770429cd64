"""The layers that produce channels: which axis of a weight holds the filters, in which order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.recorder import TraceRecorder
from fpgm.tracing.trace_values import ParameterInfo
from fpgm.utils.parameter_roles import PRODUCER_ROLES, layer_of


@dataclass(frozen=True)
class Producer:
    """A layer's filters: the tensor, the field along them, and the class of each of them."""

    info: ParameterInfo
    field: Tensor
    classes: Tensor

    @property
    def carries(self) -> bool:
        """Tell whether it only passes units on, each by itself (a depthwise convolution)."""
        return self.info.roles == ["depthwise"]

    def filters(self, weight: Tensor) -> Tensor:
        """Return the weight as [n, d]: one row per filter."""
        used = lb.axes(self.field)
        if len(used) == 1:
            return weight.movedim(used[0], 0).flatten(1) if weight.ndim > 1 else weight[:, None]
        groups = len(self.classes) // weight.shape[1]
        blocks = weight.reshape(groups, -1, *weight.shape[1:])
        return blocks.transpose(1, 2).flatten(0, 1).flatten(1)

    @property
    def layer(self) -> str:
        """Return the path of the module that owns the filters."""
        return layer_of(self.info.name)


def find_producers(trace: TraceRecorder, classes: Tensor) -> tuple[Producer, ...]:
    """List the filters of all layers, with the class of each."""
    producers = []
    for info in trace.parameter_infos.values():
        for f, role in zip(info.fields, info.roles, strict=True):
            if role in PRODUCER_ROLES:
                producers.append(Producer(info, f, classes[rows_of(f)]))
    return tuple(producers)


def rows_of(f: Tensor) -> Tensor:
    """Return labels of a layer's filters in channel order, also of grouped transposed weights."""
    if len(lb.axes(f)) == 1:
        return f.reshape(-1)
    starts = block_starts(f)
    return f.reshape(f.shape[0], -1)[starts].reshape(-1)


def block_starts(f: Tensor) -> list[int]:
    """Return the first row of each block of equal rows in a grouped weight's field."""
    rows = f.reshape(f.shape[0], -1)
    changes = (rows[1:] != rows[:-1]).any(1)
    return [0, *(torch.nonzero(changes).reshape(-1) + 1).tolist()]


def sliceable(f: Tensor) -> bool:
    """Tell whether a field lies along one axis, or is one row per block of a grouped weight."""
    used = lb.axes(f)
    if len(used) == 1:
        return True
    if used != [0, 1]:
        return False
    starts = block_starts(f)
    width = f.shape[0] // len(starts)
    return starts == list(range(0, f.shape[0], width))
