"""Group the channels of a trace: units, groups of units, and what is frozen.

Labels that met are in one class. A class with a filter and no freeze constraint is a unit. Units
that the same layers produce form a group, of which a fraction is removed. Nothing is selected here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.axis_roles import resolve_roles
from fpgm.tracing.constraints import ParameterInfo
from fpgm.tracing.recorder import TraceRecorder
from fpgm.utils.modules import modules_by_path
from fpgm.utils.parameter_info import PRODUCER_ROLES, layer_of


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
        for c in classes.unique().tolist():
            self.reasons.setdefault(c, reason)


def group_channels(trace: TraceRecorder, approximate: bool = False) -> Structure:
    """Resolve labels into classes, classes into units, units into groups."""
    classes = _tie_whole_groups(trace, _components(trace))
    resolve_roles(trace)
    structure = Structure(
        trace,
        classes,
        _producers(trace, classes),
        {},
        frozenset(),
        _balances(trace, classes),
    )
    _collect_reasons(structure, approximate)
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


def _producers(trace: TraceRecorder, classes: Tensor) -> tuple[Producer, ...]:
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


def _collect_reasons(structure: Structure, approximate: bool) -> None:
    trace = structure.trace
    soft: set[int] = set()
    for constraint in trace.freeze_constraints:
        classes = structure.classes_of(constraint.labels)
        if constraint.soft and approximate:
            soft.update(classes.tolist())
        else:
            structure.note(classes, constraint.reason)
    scripted = [
        f"{path}."
        for path, module in modules_by_path(trace.model).items()
        if isinstance(module, torch.jit.ScriptModule)
    ]
    for info in trace.parameter_infos.values():
        for f in info.fields:
            if info.name.startswith(tuple(scripted)):
                structure.note(structure.classes_of(f), "a scripted module cannot be resized")
            if not sliceable(f):
                structure.note(
                    structure.classes_of(f), f"'{info.name}' does not hold them along one axis"
                )
    structure.approximate = frozenset(soft)


def _freeze_unbalanced(structure: Structure) -> None:
    """Freeze blocks whose partners cannot shrink."""
    changed = True
    while changed:
        changed = False
        for blocks in structure.balances:
            free = [[c for c in row if c not in structure.reasons] for row in blocks.tolist()]
            if all(free) or not any(free):
                continue
            for row in free:
                for c in row:
                    structure.reasons[c] = "they must match channels that are frozen"
            changed = True


def _channel_groups(structure: Structure) -> list[ChannelGroup]:
    """Group units by the set of layers that produce them."""
    _freeze_unbalanced(structure)
    count = int(structure.classes.max()) + 1
    generator = torch.Generator().manual_seed(0)
    signature = torch.zeros(count, dtype=torch.int64)
    for producer in structure.producers:
        key = torch.randint(1 << 61, (1,), generator=generator)
        signature[producer.classes.unique()] += key
    signature[list(structure.reasons)] = 0
    units: dict[int, Tensor] = {}
    rows: dict[int, int] = {}
    producers: dict[int, list[Producer]] = {}
    for producer in structure.producers:
        keys = signature[producer.classes]
        for key in dict.fromkeys(keys.tolist()):
            if key and key not in units:
                classes_of_key = producer.classes[keys == key].tolist()
                units[key], rows[key] = (
                    torch.tensor(list(dict.fromkeys(classes_of_key))),
                    len(classes_of_key),
                )
            producers.setdefault(key, []).append(producer)
    return [
        ChannelGroup(
            producers[key][0].layer,
            classes,
            tuple(producers[key]),
            exact=not structure.approximate.intersection(classes.tolist()),
            channels_per_unit=max(1, rows[key] // len(classes)),
        )
        for key, classes in units.items()
    ]


def frozen_rows(structure: Structure) -> list[tuple[tuple[str, ...], int, str]]:
    """List layers, channels and reason of all frozen filters, for display."""
    stays = torch.zeros(len(structure.classes), dtype=torch.bool)
    stays[list(structure.reasons)] = True
    rows: dict[str, tuple[list[str], int]] = {}
    for producer in structure.producers:
        counts = Counter(
            structure.reasons[c] for c in producer.classes[stays[producer.classes]].tolist()
        )
        for reason, count in counts.items():
            layers, total = rows.get(reason, ([], 0))
            rows[reason] = ([*layers, producer.layer], total + count)
    return [(tuple(dict.fromkeys(layers)), n, reason) for reason, (layers, n) in rows.items()]


def unreached_rows(names: Sequence[str]) -> list[tuple[tuple[str, ...], int, str]]:
    """List parameters that no forward pass has used, for display."""
    layers = tuple(dict.fromkeys(layer_of(name) for name in names))
    return [(layers, 0, "no forward pass with the example inputs uses them")] if layers else []
