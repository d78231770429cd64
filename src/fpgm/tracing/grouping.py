"""From what was watched to what can be decided: units, pools of units, and what is frozen.

Labels that met are one class. A class with a filter somewhere and no reason to stay is a unit;
units written by the same layers form a pool, from which a share is removed. Nothing is chosen here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.axis_roles import settle_roles
from fpgm.tracing.constraints import Slot
from fpgm.tracing.recorder import Watch
from fpgm.utils.modules import modules_by_path
from fpgm.utils.parameter_info import WRITES, layer_of


@dataclass(frozen=True)
class Writer:
    """A layer's filters: the tensor, the field along them, and the class of each of them."""

    slot: Slot
    field: Tensor
    classes: Tensor

    @property
    def carries(self) -> bool:
        """Whether it only hands units on, one by one (a depthwise convolution)."""
        return self.slot.roles == ["depthwise"]

    def filters(self, weight: Tensor) -> Tensor:
        """The weight as [n, d]: one row a filter."""
        used = lb.axes(self.field)
        if len(used) == 1:
            return weight.movedim(used[0], 0).flatten(1) if weight.ndim > 1 else weight[:, None]
        groups = len(self.classes) // weight.shape[1]
        blocks = weight.reshape(groups, -1, *weight.shape[1:])
        return blocks.transpose(1, 2).flatten(0, 1).flatten(1)

    @property
    def layer(self) -> str:
        """Path of the module that owns the filters."""
        return layer_of(self.slot.name)


@dataclass
class Pool:
    """Units that the same layers write, in channel order."""

    name: str
    units: Tensor
    writers: tuple[Writer, ...]
    exact: bool = True
    channels_per_unit: int = 1
    """How many rows of its first layer one unit holds."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Paths of the layers that write them."""
        return tuple(dict.fromkeys(w.layer for w in self.writers))


@dataclass
class Structure:
    """Everything selection needs to know about a model."""

    seen: Watch
    classes: Tensor
    writers: tuple[Writer, ...]
    reasons: dict[int, str]
    approximate: frozenset[int]
    balances: list[Tensor]
    pools: list[Pool] = field(default_factory=list)

    def of(self, labels: Tensor) -> Tensor:
        """Class of every label."""
        return self.classes[labels]

    def kept_labels(self, removed: Tensor) -> Tensor:
        """Boolean over labels from the classes that go."""
        gone = torch.zeros(int(self.classes.max()) + 1, dtype=torch.bool)
        gone[removed] = True
        return ~gone[self.classes]

    def macs(self, kept: Tensor | None = None) -> int:
        """Multiply-accumulates of the first example when only these labels stay (None: all)."""
        total = 0
        for work in self.seen.works:
            amount = work.times
            for factor in work.factors:
                amount *= lb.kept_numel(factor.fields, factor.shape, kept)
            total += amount
        return total

    def params(self, kept: Tensor | None = None) -> int:
        """Parameters when only these labels stay (None: all)."""
        return sum(
            lb.kept_numel(tuple(slot.fields), slot.shape, kept)
            for slot in self.seen.slots.values()
            if slot.trainable
        )

    def places(self, units: Tensor, labels: Tensor) -> Tensor:
        """Which of these units each label belongs to, or −1."""
        place = torch.full((int(self.classes.max()) + 1,), -1)
        place[units] = torch.arange(len(units))
        return place[self.of(labels)]

    def readers(self, units: Tensor) -> list[tuple[str, Tensor]]:
        """Layers that read these units, and which of them each channel they read is, or −1."""
        found = []
        for slot in self.seen.slots.values():
            layer, _, kind = slot.name.rpartition(".")
            for f, role in zip(slot.fields, slot.roles, strict=True):
                if role == "reads" and kind == "weight":
                    places = self.places(units, rows_of(f))
                    if bool((places >= 0).any()):
                        found.append((layer, places))
        return found

    def freeze(self, classes: Tensor, reason: str) -> None:
        """Leave these classes alone from now on."""
        self.note(classes, reason)
        self.pools = _pools(self)

    def note(self, classes: Tensor, reason: str) -> None:
        """Why these classes stay; the first reason given holds."""
        for c in classes.unique().tolist():
            self.reasons.setdefault(c, reason)


def couple(seen: Watch, approximate: bool = False) -> Structure:
    """Resolve labels into classes, classes into units, units into pools."""
    classes = _tie_whole_groups(seen, _components(seen))
    settle_roles(seen)
    structure = Structure(
        seen,
        classes,
        _writers(seen, classes),
        {},
        frozenset(),
        _balances(seen, classes),
    )
    _collect_reasons(structure, approximate)
    structure.pools = _pools(structure)
    return structure


def _tie_whole_groups(seen: Watch, classes: Tensor) -> Tensor:
    """A group of a convolution that is one unit on one side (a norm spans it) goes on both."""
    waiting = list(seen.pairings)
    while True:
        whole = [
            i
            for i, pair in enumerate(waiting)
            if any(_one_class_each(classes[side]) for side in pair)
        ]
        if not whole:
            return classes
        for i in reversed(whole):
            ins, outs = waiting.pop(i)
            seen.tie(ins, [1])
            seen.relate(outs, ins[:, :1])
        classes = _components(seen)


def _balances(seen: Watch, classes: Tensor) -> list[Tensor]:
    """Rows of classes that must keep equally many; what is one unit each goes whole, if it may."""
    rows = [(classes[balance.blocks], balance.whole) for balance in seen.balances]
    return [blocks for blocks, whole in rows if not (whole and _one_class_each(blocks))]


def _one_class_each(blocks: Tensor) -> bool:
    """Blocks of which each is one unit (a norm over each) go whole: there is nothing to balance."""
    return bool((blocks == blocks[:, :1]).all())


def _components(seen: Watch) -> Tensor:
    """Connected components of all labels that met: hook the larger root to the smaller, repeat."""
    parent = torch.arange(seen.count)
    if not seen.pairs:
        return parent
    a = torch.cat([pair[0] for pair in seen.pairs])
    b = torch.cat([pair[1] for pair in seen.pairs])
    while True:
        low, high = torch.minimum(parent[a], parent[b]), torch.maximum(parent[a], parent[b])
        open_ = low != high
        if not bool(open_.any()):
            return parent
        a, b = a[open_], b[open_]
        parent.scatter_reduce_(0, high[open_], low[open_], "amin")
        while not torch.equal(parent, parent[parent]):
            parent = parent[parent]


def _writers(seen: Watch, classes: Tensor) -> tuple[Writer, ...]:
    found = []
    for slot in seen.slots.values():
        for f, role in zip(slot.fields, slot.roles, strict=True):
            if role in WRITES:
                found.append(Writer(slot, f, classes[rows_of(f)]))
    return tuple(found)


def rows_of(f: Tensor) -> Tensor:
    """Labels of a layer's filters in channel order, grouped transposed weights included."""
    if len(lb.axes(f)) == 1:
        return f.reshape(-1)
    starts = block_starts(f)
    return f.reshape(f.shape[0], -1)[starts].reshape(-1)


def block_starts(f: Tensor) -> list[int]:
    """First row of each block of equal rows in a grouped weight's per-block field."""
    rows = f.reshape(f.shape[0], -1)
    changes = (rows[1:] != rows[:-1]).any(1)
    return [0, *(torch.nonzero(changes).reshape(-1) + 1).tolist()]


def sliceable(f: Tensor) -> bool:
    """Whether a field lies along one axis, or is one row per block of a grouped weight."""
    used = lb.axes(f)
    if len(used) == 1:
        return True
    if used != [0, 1]:
        return False
    starts = block_starts(f)
    width = f.shape[0] // len(starts)
    return starts == list(range(0, f.shape[0], width))


def _collect_reasons(structure: Structure, approximate: bool) -> None:
    seen = structure.seen
    soft: set[int] = set()
    for stop in seen.stops:
        classes = structure.of(stop.labels)
        if stop.soft and approximate:
            soft.update(classes.tolist())
        else:
            structure.note(classes, stop.reason)
    scripted = [
        f"{path}."
        for path, module in modules_by_path(seen.model).items()
        if isinstance(module, torch.jit.ScriptModule)
    ]
    for slot in seen.slots.values():
        for f in slot.fields:
            if slot.name.startswith(tuple(scripted)):
                structure.note(structure.of(f), "a scripted module cannot be resized")
            if not sliceable(f):
                structure.note(structure.of(f), f"'{slot.name}' does not hold them along one axis")
    structure.approximate = frozenset(soft)


def _freeze_unbalanced(structure: Structure) -> None:
    """A block that cannot shrink keeps its partners from shrinking."""
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


def _pools(structure: Structure) -> list[Pool]:
    """Units grouped by the set of layers that write them."""
    _freeze_unbalanced(structure)
    count = int(structure.classes.max()) + 1
    generator = torch.Generator().manual_seed(0)
    signature = torch.zeros(count, dtype=torch.int64)
    for writer in structure.writers:
        key = torch.randint(1 << 61, (1,), generator=generator)
        signature[writer.classes.unique()] += key
    signature[list(structure.reasons)] = 0
    units: dict[int, Tensor] = {}
    rows: dict[int, int] = {}
    writers: dict[int, list[Writer]] = {}
    for writer in structure.writers:
        mine = signature[writer.classes]
        for key in dict.fromkeys(mine.tolist()):
            if key and key not in units:
                own = writer.classes[mine == key].tolist()
                units[key], rows[key] = torch.tensor(list(dict.fromkeys(own))), len(own)
            writers.setdefault(key, []).append(writer)
    return [
        Pool(
            writers[key][0].layer,
            classes,
            tuple(writers[key]),
            exact=not structure.approximate.intersection(classes.tolist()),
            channels_per_unit=max(1, rows[key] // len(classes)),
        )
        for key, classes in units.items()
    ]


def frozen_rows(structure: Structure) -> list[tuple[tuple[str, ...], int, str]]:
    """Layers, channels and reason of everything with filters that stays, for people."""
    stays = torch.zeros(len(structure.classes), dtype=torch.bool)
    stays[list(structure.reasons)] = True
    rows: dict[str, tuple[list[str], int]] = {}
    for writer in structure.writers:
        counts = Counter(
            structure.reasons[c] for c in writer.classes[stays[writer.classes]].tolist()
        )
        for reason, count in counts.items():
            layers, total = rows.get(reason, ([], 0))
            rows[reason] = ([*layers, writer.layer], total + count)
    return [(tuple(dict.fromkeys(layers)), n, reason) for reason, (layers, n) in rows.items()]


def unreached_rows(names: Sequence[str]) -> list[tuple[tuple[str, ...], int, str]]:
    """Parameters no forward pass has used."""
    layers = tuple(dict.fromkeys(layer_of(name) for name in names))
    return [(layers, 0, "no forward pass with the example inputs uses them")] if layers else []
