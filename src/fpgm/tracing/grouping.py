"""Group the channels of a trace: units, groups of units, and what is frozen.

Labels that met are in one class. A class with a filter and no freeze constraint is a unit. Units
that the same layers produce form a group, of which a fraction is removed. Nothing is selected here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.axis_roles import resolve_roles
from fpgm.tracing.freeze_reasons import add_reason, collect_reasons, freeze_unbalanced
from fpgm.tracing.producers import Producer, find_producers, rows_of
from fpgm.tracing.recorder import TraceRecorder


@dataclass
class ChannelGroup:
    """Units that the same layers produce, in channel order."""

    name: str
    units: Tensor
    producers: tuple[Producer, ...]
    exact: bool = True
    channels_per_unit: int = 1
    """How many rows of its first layer one unit holds."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the paths of the layers that produce them."""
        return tuple(dict.fromkeys(w.layer for w in self.producers))


@dataclass
class Structure:
    """Everything selection needs to know about a model."""

    trace: TraceRecorder
    classes: Tensor
    producers: tuple[Producer, ...]
    reasons: dict[int, str]
    approximate: frozenset[int]
    balances: list[Tensor]
    groups: list[ChannelGroup] = field(default_factory=list)

    def classes_of(self, labels: Tensor) -> Tensor:
        """Return the class of every label."""
        return self.classes[labels]

    def kept_labels(self, removed: Tensor) -> Tensor:
        """Return a boolean over labels: False where the class is removed."""
        removed_classes = torch.zeros(int(self.classes.max()) + 1, dtype=torch.bool)
        removed_classes[removed] = True
        return ~removed_classes[self.classes]

    def macs(self, kept: Tensor | None = None) -> int:
        """Count multiply-accumulates of the first example if these labels are kept (None: all)."""
        total = 0
        for op_cost in self.trace.op_costs:
            amount = op_cost.times
            for factor in op_cost.factors:
                amount *= lb.kept_numel(factor.fields, factor.shape, kept)
            total += amount
        return total

    def frozen_macs(self) -> int:
        """Count multiply-accumulates of operators that no unit of any group takes part in."""
        count = int(self.classes.max()) + 1 if len(self.classes) else 0
        in_group = torch.zeros(count, dtype=torch.bool)
        for group in self.groups:
            in_group[group.units] = True
        prunable = in_group[self.classes]
        return sum(
            op_cost.times * math.prod(math.prod(factor.shape) for factor in op_cost.factors)
            for op_cost in self.trace.op_costs
            if not any(bool(prunable[f].any()) for x in op_cost.factors for f in x.fields)
        )

    def params(self, kept: Tensor | None = None) -> int:
        """Count parameters if only these labels are kept (None: all)."""
        return sum(
            lb.kept_numel(tuple(info.fields), info.shape, kept)
            for info in self.trace.parameter_infos.values()
            if info.trainable
        )

    def places(self, units: Tensor, labels: Tensor) -> Tensor:
        """Return which of these units each label belongs to, or −1."""
        place = torch.full((int(self.classes.max()) + 1,), -1)
        place[units] = torch.arange(len(units))
        return place[self.classes_of(labels)]

    def consumers(self, units: Tensor) -> list[tuple[str, Tensor]]:
        """List the layers that read these units, and the unit of each input channel, or −1."""
        consumers = []
        for info in self.trace.parameter_infos.values():
            layer, _, kind = info.name.rpartition(".")
            for f, role in zip(info.fields, info.roles, strict=True):
                if role == "reads" and kind == "weight":
                    places = self.places(units, rows_of(f))
                    if bool((places >= 0).any()):
                        consumers.append((layer, places))
        return consumers

    def freeze(self, classes: Tensor, reason: str) -> None:
        """Freeze these classes."""
        self.note(classes, reason)
        self.groups = _channel_groups(self)

    def note(self, classes: Tensor, reason: str) -> None:
        """Record why these classes are frozen; the first reason is kept."""
        add_reason(self.reasons, classes, reason)


def group_channels(trace: TraceRecorder, approximate: bool = False) -> Structure:
    """Resolve labels into classes, classes into units, units into groups."""
    classes = _tie_whole_groups(trace, _components(trace))
    resolve_roles(trace)
    producers = find_producers(trace, classes)
    reasons, soft = collect_reasons(trace, classes, approximate)
    structure = Structure(trace, classes, producers, reasons, soft, _balances(trace, classes))
    structure.groups = _channel_groups(structure)
    return structure


def _tie_whole_groups(trace: TraceRecorder, classes: Tensor) -> Tensor:
    """Tie a convolution's groups that are one unit on one side (a norm spans them) on both."""
    pending = list(trace.pairings)
    while True:
        whole = [
            i
            for i, pair in enumerate(pending)
            if any(_one_class_each(classes[side]) for side in pair)
        ]
        if not whole:
            return classes
        for i in reversed(whole):
            ins, outs = pending.pop(i)
            trace.tie(ins, [1])
            trace.relate(outs, ins[:, :1])
        classes = _components(trace)


def _balances(trace: TraceRecorder, classes: Tensor) -> list[Tensor]:
    """Return rows of classes that must keep equally many, unless each row is one unit."""
    rows = [(classes[balance.blocks], balance.whole) for balance in trace.balances]
    return [blocks for blocks, whole in rows if not (whole and _one_class_each(blocks))]


def _one_class_each(blocks: Tensor) -> bool:
    """Tell whether each block is one unit (a norm over each): then none can be split."""
    return bool((blocks == blocks[:, :1]).all())


def _components(trace: TraceRecorder) -> Tensor:
    """Find connected components of labels that met: hook larger roots to smaller, repeat."""
    parent = torch.arange(trace.count)
    if not trace.pairs:
        return parent
    a = torch.cat([pair[0] for pair in trace.pairs])
    b = torch.cat([pair[1] for pair in trace.pairs])
    while True:
        low, high = torch.minimum(parent[a], parent[b]), torch.maximum(parent[a], parent[b])
        open_ = low != high
        if not bool(open_.any()):
            return parent
        a, b = a[open_], b[open_]
        parent.scatter_reduce_(0, high[open_], low[open_], "amin")
        while not torch.equal(parent, parent[parent]):
            parent = parent[parent]


def _channel_groups(structure: Structure) -> list[ChannelGroup]:
    """Group units by the set of layers that produce them."""
    freeze_unbalanced(structure.reasons, structure.balances)
    count = int(structure.classes.max()) + 1
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << 61, (len(structure.producers),), generator=generator).numpy()
    signature = np.zeros(count, dtype=np.int64)
    for producer, number in zip(structure.producers, numbers, strict=True):
        signature[producer.classes.numpy()] += number  # once for each class
    signature[list(structure.reasons)] = 0
    units: dict[int, Tensor] = {}
    rows: dict[int, int] = {}
    producers: dict[int, list[Producer]] = {}
    for producer in structure.producers:
        all_classes = producer.classes.numpy()
        keys = signature[all_classes]
        for key in distinct(keys).tolist():
            if key and key not in units:
                classes_of_key = all_classes[keys == key]
                units[key] = torch.from_numpy(distinct(classes_of_key))
                rows[key] = len(classes_of_key)
            producers.setdefault(key, []).append(producer)
    return [
        ChannelGroup(
            producers[key][0].layer,
            classes,
            tuple(producers[key]),
            exact=not structure.approximate
            or not structure.approximate.intersection(classes.tolist()),
            channels_per_unit=max(1, rows[key] // len(classes)),
        )
        for key, classes in units.items()
    ]


def distinct(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return numbers without repetitions, in the order in which they first occur.

    >>> distinct(np.array([3, 5, 3, 4])).tolist()
    [3, 5, 4]
    """
    if len(numbers) and bool((numbers == numbers[0]).all()):
        return numbers[:1]
    if bool((numbers[1:] > numbers[:-1]).all()):
        return numbers
    return np.array(list(dict.fromkeys(numbers.tolist())))
