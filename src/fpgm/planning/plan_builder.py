"""Build a plan from the chosen classes: cuts, attributes, adapters and rows for display."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpgm.planning.narrow_groups import narrow_group_note
from fpgm.planning.remembered_sizes import Widths, follow_sizes
from fpgm.planning.selection import Choice
from fpgm.pruning.compaction import fingerprint
from fpgm.pruning.plan import Attribute, Cached, Cut, Frozen, Group, Plan, StaleSize
from fpgm.pruning.plan_checks import holds_size
from fpgm.pruning.slicing import by_tensor
from fpgm.tracing import labels as lb
from fpgm.tracing.freeze_reasons import frozen_rows, unreached_rows
from fpgm.tracing.grouping import Structure
from fpgm.tracing.producers import block_starts
from fpgm.tracing.trace_values import InsertionPoint, ParameterInfo
from fpgm.utils.adapter_spec import Adapter, Kind, Side
from fpgm.utils.modules import modules_by_path
from fpgm.utils.parameter_roles import Role, layer_of
from fpgm.utils.size_names import FIRST_DIM, SECOND_DIM


@dataclass(frozen=True)
class RememberedSize:
    """A module's number (or list) that depends on rows of channels, found in a dry run."""

    module: str
    name: str
    rows: tuple[Tensor, ...]


class EmptyAxisError(Exception):
    """A tensor would keep nothing along an axis."""

    def __init__(self, classes: Tensor) -> None:
        super().__init__("nothing left")
        self.classes = classes


class UnevenBlocksError(Exception):
    """Blocks of a grouped weight would keep different numbers."""

    def __init__(self, classes: Tensor) -> None:
        super().__init__("uneven blocks")
        self.classes = classes


def build_plan(
    model: nn.Module,
    structure: Structure,
    choice: Choice,
    asked: Mapping[str, Any],
    remembered: Sequence[RememberedSize] = (),
    protected: Collection[tuple[str, str]] = (),
    widths: Widths | None = None,
) -> Plan:
    """Build the plan that removes the chosen units.

    Args:
        model: The original model.
        structure: Its channel groups and trace.
        choice: The units to remove.
        asked: The user's request.
        remembered: Numbers stored in modules that depend on rows of channels.
        protected: Attributes that must not change, by module and name.
        widths: Widths of the model's modules, if stored sizes are to be updated.
    """
    kept = structure.kept_labels(choice.removed)
    rows: Rows = {}
    parameter_infos = structure.trace.parameter_infos.values()
    cuts = tuple(c for info in parameter_infos for c in _cuts(structure, info, kept, rows))
    attributes = [
        a
        for a in _attributes(model, structure, cuts, kept, remembered)
        if (a.module, a.name) not in protected
    ]
    groups = tuple(
        Group(group.name, group.layers, len(group.units), count, group.exact)
        for group, count in zip(structure.groups, choice.kept, strict=True)
    )
    advice = narrow_group_note(structure, groups) if "allocate" not in asked else None
    known = {(a.module, a.name) for a in attributes}
    followed, stale = ([], []) if widths is None else follow_sizes(model, widths, kept, known)
    may_read = structure.trace.code.may_read
    unread = [a for a in followed if not may_read(a.name)]
    stale += [StaleSize(a.module, a.name, a.before) for a in followed if may_read(a.name)]
    return Plan(
        fingerprint=fingerprint(model),
        asked=dict(asked),
        cuts=cuts,
        attributes=(*attributes, *unread),
        adapters=(
            *_window_adapters(structure, kept),
            *_stream_adapters(structure, kept),
            *_earlier_adapters(structure, kept),
        ),
        outputs=tuple(_output_cuts(structure, kept)),
        groups=groups,
        frozen=tuple(
            Frozen(*row)
            for row in [
                *frozen_rows(structure.producers, structure.reasons),
                *unreached_rows(structure.trace.unreached_parameters()),
            ]
        ),
        notes=(*structure.trace.notes, *([] if advice is None else [advice])),
        stale=tuple(stale),
        cached=tuple(_cached_cuts(structure, kept)),
        macs_before=structure.macs(),
        macs_after=structure.macs(kept),
        macs_frozen=structure.frozen_macs(),
        params_before=structure.params(),
        params_after=structure.params(kept),
    )


Rows = dict[tuple[int, int, int], tuple[int, ...]]
"""Kept positions of a row of labels, by its memory: a layer and its norm share one."""


def _cuts(structure: Structure, info: ParameterInfo, kept: Tensor, rows: Rows) -> list[Cut]:
    cuts = []
    for f, role in zip(info.fields, info.roles, strict=True):
        used = lb.axes(f)
        if len(used) > 1:
            if not bool(kept[f].all()):
                cuts += _block_cut(structure, info, f, kept, role)
            continue
        row = f.data_ptr(), f.numel(), f.stride(used[0])
        if row not in rows:
            rows[row] = tuple(np.flatnonzero(kept.numpy()[f.reshape(-1).numpy()]).tolist())
        keep = rows[row]
        if not keep:
            raise EmptyAxisError(structure.classes_of(f.reshape(-1)))
        if len(keep) < f.numel():
            cuts.append(Cut(info.name, used[0], f.numel(), keep, role))
    return cuts


def _output_cuts(structure: Structure, kept: Tensor) -> Iterator[Cut]:
    """Yield the cuts of the model's outputs; raise where channels lie along several axes."""
    for number, factor in enumerate(structure.trace.outputs):
        for f in factor.fields:
            stays = kept[f].reshape(-1)
            if bool(stays.all()):
                continue
            if len(lb.axes(f)) != 1:
                raise UnevenBlocksError(structure.classes_of(f.reshape(-1)))
            keep = tuple(torch.nonzero(stays).reshape(-1).tolist())
            yield Cut(str(number), lb.axes(f)[0], f.numel(), keep, "reads")


def _cached_cuts(structure: Structure, kept: Tensor) -> Iterator[Cached]:
    """Yield the cuts of activations that modules cache in plain attributes."""
    for (path, name), factors in structure.trace.cached.items():
        fields = [f for factor in factors for f in factor.fields]
        if all(bool(kept[f].all()) for f in fields):
            continue
        cuts = {
            (
                lb.axes(f)[0],
                f.numel(),
                tuple(torch.nonzero(kept[f].reshape(-1)).reshape(-1).tolist()),
            )
            if len(lb.axes(f)) == 1
            else (0, 0, ())
            for f in fields
        }
        dim, size, keep = cuts.pop() if len(cuts) == 1 else (0, 0, ())
        yield Cached(path, name, dim, size, keep)


def _block_cut(
    structure: Structure, info: ParameterInfo, f: Tensor, kept: Tensor, role: Role
) -> list[Cut]:
    """Cut a grouped weight: blocks keep equally many columns; whole blocks are cut as rows."""
    rows = kept[f].reshape(f.shape[0], -1)[block_starts(f)]
    counts = rows.sum(1)
    alive = counts[counts > 0]
    if not len(alive):
        raise EmptyAxisError(structure.classes_of(f.reshape(-1)))
    if not bool((alive == alive[0]).all()):
        raise UnevenBlocksError(structure.classes_of(f.reshape(-1)))
    if len(alive) < len(counts):
        per_row = next(g for g in info.fields if lb.axes(g) == [0]).reshape(len(counts), -1)
        lives = kept[per_row].any(1)
        if bool((alive == f.shape[1]).all()) and torch.equal(lives, counts > 0):
            return []  # the rows of those blocks are removed, and the others are kept
        raise UnevenBlocksError(structure.classes_of(f.reshape(-1)))
    keep = torch.nonzero(rows)[:, 1].tolist()
    return [Cut(info.name, 1, f.shape[1], tuple(keep), role, len(counts))]


def _attributes(
    model: nn.Module,
    structure: Structure,
    cuts: Sequence[Cut],
    kept: Tensor,
    remembered: Sequence[RememberedSize],
) -> list[Attribute]:
    """List the sizes that modules store and that the cuts change."""
    changes: dict[tuple[str, str], Attribute] = {}
    modules = modules_by_path(model)

    def change(module: str, name: str, before: Any, after: Any) -> None:
        if before != after:
            changes.setdefault((module, name), Attribute(module, name, before, after))

    for grouping in structure.trace.groupings:
        old = grouping.blocks.shape[0]
        new = int(kept[grouping.blocks].any(1).sum())
        for name in _group_names(modules[grouping.module], old):
            change(grouping.module, name, old, new)
    groups_after = {m: a.after for (m, n), a in changes.items() if n == "groups"}
    shapes = {info.name: info.shape for info in structure.trace.parameter_infos.values()}
    names = {key: info.name for key, info in structure.trace.parameter_infos.items()}
    by_name = by_tensor(cuts)
    for tensor, tensor_cuts in by_name.items():
        path = layer_of(tensor) if "." in tensor else ""
        module = modules[path]
        weight = module._parameters.get("weight")
        if weight is not None and names[id(weight)] not in by_name:
            continue  # the sizes are those of a weight that nothing uses
        sizes = {c.dim: (c.size, c.kept) for c in tensor_cuts}
        if len(shapes[tensor]) == 1 and module.__dict__.get("transposed"):
            sizes = {1: sizes[0]}  # a bias has a number for each output, as dim 1 of the weight
        groups = module.__dict__.get("groups", 1)
        for name, before, after in _sizes(module, sizes, groups, groups_after.get(path, groups)):
            change(path, name, before, after)
    for (_, path, _), out in structure.trace.returns.items():
        module = modules[path]
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and not module.affine:
            # It has no weight to cut, but compares its input with a stored number.
            for f in out.fields:
                if f.numel() == module.num_features and lb.axes(f) == [1]:
                    stays = int(kept[f.reshape(-1)].sum())
                    change(path, "num_features", module.num_features, stays)
    for item in remembered:
        module = modules[item.module]
        before = getattr(module, item.name)
        counts = tuple(int(kept[row].sum()) for row in item.rows)
        listed = isinstance(before, list | tuple)
        change(
            item.module,
            item.name,
            tuple(before) if listed else before,
            counts if listed else counts[0],
        )
    return list(changes.values())


def _group_names(module: nn.Module, groups: int) -> list[str]:
    """Return the attributes that hold a module's number of groups."""
    named = [
        n
        for n in ("groups", "num_groups")
        if getattr(module, n, None) == groups and holds_size(module, n)
    ]
    return named or [
        name
        for name, value in vars(module).items()
        if type(value) is int
        and value == groups
        and ("group" in name or "channel" in name)
        and not _SIZE_OF_GROUP.search(name)
        and holds_size(module, name)
    ]


_SIZE_OF_GROUP = re.compile(r"(^|_)per(_|$)|size|width")
"""Names of numbers that count the channels of a group, not groups: `channels_per_group`."""


def _sizes(
    module: nn.Module, sizes: Mapping[int, tuple[int, int]], groups: int, groups_after: Any
) -> list[tuple[str, Any, Any]]:
    """Return name, old and new value of the sizes a module stores about its own weight."""
    transposed = bool(module.__dict__.get("transposed", False))
    changes: list[tuple[str, Any, Any]] = []
    for names, dim in ((FIRST_DIM, 1 if transposed else 0), (SECOND_DIM, 0 if transposed else 1)):
        for name in names:
            held = module.__dict__.get(name)
            if type(held) is not int:
                continue
            if dim in sizes and held in (sizes[dim][0], sizes[dim][0] * groups):
                per_group = held != sizes[dim][0] and groups > 1
                changes.append((name, held, sizes[dim][1] * (groups_after if per_group else 1)))
            elif dim == 1 and groups_after != groups and held % groups == 0:
                changes.append((name, held, held // groups * groups_after))
    shape = module.__dict__.get("normalized_shape")
    if shape is not None and len(shape) == 1 and 0 in sizes:
        changes.append(("normalized_shape", tuple(shape), (sizes[0][1],)))
    return changes


def _window_adapters(structure: Structure, kept: Tensor) -> list[Adapter]:
    """Give convolutions along the channels the full width: scatter before, gather after."""
    adapters: dict[str, list[Adapter]] = {}
    for window in structure.trace.windows:
        stays = kept[window.labels]
        if not bool(stays.all()):
            index = tuple(torch.nonzero(stays).reshape(-1).tolist())
            size = window.labels.numel()
            adapters[window.module] = [
                Adapter(window.module, "input", "scatter", window.dim, index, size),
                Adapter(window.module, "output", "gather", window.dim, index, size),
            ]
    return [adapter for pair in adapters.values() for adapter in pair]


def _stream_adapters(structure: Structure, kept: Tensor) -> list[Adapter]:
    """Scatter branches into full-width streams; gather them again for a direct consumer."""
    ends: tuple[tuple[list[InsertionPoint], Side, Kind], ...] = (
        (structure.trace.insertion_points, "output", "scatter"),
        (structure.trace.picks, "input", "gather"),
    )
    adapters: dict[tuple[str, Side], Adapter] = {}
    for insertion_points, side, kind in ends:
        for point in insertion_points:
            stays = kept[point.labels]
            if not bool(stays.all()):
                index = tuple(torch.nonzero(stays).reshape(-1).tolist())
                size = point.labels.numel()
                adapters[point.module, side] = Adapter(
                    point.module, side, kind, point.dim, index, size
                )
    return list(adapters.values())


def _earlier_adapters(structure: Structure, kept: Tensor) -> list[Adapter]:
    """Return adapters of earlier plans that now move fewer channels, or pick from fewer."""
    adapters: dict[tuple[str, Side], Adapter] = {}
    for (_, side), move in structure.trace.moves.items():
        adapter, stays = move.adapter, kept[move.labels]
        left = [i for i, stay in zip(adapter.index, stays.tolist(), strict=False) if stay]
        size = adapter.size
        if move.wide is not None:
            wide = kept[move.wide]
            size, number = int(wide.sum()), wide.cumsum(0) - 1
            left = [int(number[i]) for i in left]
        new = replace(adapter, index=tuple(left), size=size)
        if len(stays) and new != adapter:
            adapters[adapter.module, side] = new
    return list(adapters.values())
