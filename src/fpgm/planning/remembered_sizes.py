"""Find sizes that modules store as plain numbers: those a plan updates, and those it does not.

Code that no forward pass has run may read them: an exporter's other forward, `switch_to_deploy`.
A number is compared with the widths of the module's own tensors, the nearest first. It is updated
if its name is that of a size and all widths of that value keep equally many channels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from fpgm.pruning.plan import Attribute, StaleSize
from fpgm.pruning.plan_checks import holds_size
from fpgm.tracing.grouping import Structure
from fpgm.tracing.labels import axes, count_kept
from fpgm.tracing.producers import rows_of
from fpgm.utils.modules import modules_by_path
from fpgm.utils.parameter_roles import PRODUCER_ROLES

Side = Literal["in", "out", ""]

_SIZES = frozenset(
    ("c", "ch", "chs", "chan", "chans", "channel", "channels", "cin", "cout", "dim", "dims",
     "width", "widths", "plane", "planes", "inplanes", "outplanes", "feature", "features", "feat",
     "feats", "filter", "filters", "hidden", "embed", "inp", "oup", "inc", "outc", "nf", "ngf",
     "ndf", "in", "out", "nin", "nout", "inner", "expand", "squeeze", "mid")
)  # fmt: skip
_NO_SIZES = frozenset(
    ("kernel", "k", "stride", "strides", "pad", "padding", "dilation", "heads", "class",
     "classes", "nc", "group", "groups", "patch", "window", "img", "image", "resolution", "res",
     "layer", "layers", "depth", "block", "blocks", "seq", "len", "length", "ratio", "reduction",
     "scale", "step", "steps", "count", "seed", "rate", "index", "id", "pos")
)  # fmt: skip
_IN = frozenset(("in", "inp", "inc", "cin", "nin", "inplanes", "input"))
_OUT = frozenset(("out", "oup", "outc", "cout", "nout", "outplanes", "output"))


@dataclass(frozen=True)
class Width:
    """A row of channels some levels below a module, and on which side of a layer it is.

    Level −1: it is the input or output of an operator that the module itself calls (a split, a
    view).
    """

    level: int
    side: Side
    row: Tensor


class Widths:
    """The widths of every module's own tensors, by the module's path."""

    def __init__(self, structure: Structure) -> None:
        self._rows_by_length: dict[int, list[tuple[str, Side, Tensor]]] = {}
        """By their length: rows along modules' tensors and what they return, with the path."""
        self._rows_of_operators: dict[str, list[Tensor]] = {}
        """Rows that operators of the module itself split or joined."""
        trace = structure.trace
        for ((_, path, _), _), op in trace.fixed_size_ops.items():
            self._rows_of_operators.setdefault(path, []).extend(op.rows())
        for info in trace.parameter_infos.values():
            owner = info.name.rpartition(".")[0]
            for field, role in zip(info.fields, info.roles, strict=True):
                side: Side = "in" if role == "reads" else "out" if role in PRODUCER_ROLES else ""
                self._add(owner, side, rows_of(field))
        for (_, path, _), out in trace.returns.items():
            for field in out.fields:
                if len(axes(field)) == 1:
                    self._add(path, "out", field.reshape(-1))

    def _add(self, path: str, side: Side, row: Tensor) -> None:
        self._rows_by_length.setdefault(row.numel(), []).append((path, side, row))

    def _below(self, path: str, value: int) -> Iterator[Width]:
        """Yield the widths with this value of a module and all modules inside it."""
        for row in self._rows_of_operators.get(path, ()):
            if len(row) == value:
                yield Width(-1, "", row)
        inside = f"{path}." if path else ""
        for owner, side, row in self._rows_by_length.get(value, ()):
            if owner == path or owner.startswith(inside):
                yield Width(_depth(owner) - _depth(path), side, row)

    def changed_widths(self, kept: Tensor) -> set[int]:
        """Return the old widths that have changed."""
        rows = [row for entries in self._rows_by_length.values() for _, _, row in entries]
        rows += self._rows_of_operators.get("", [])
        once = {(row.data_ptr(), len(row)): row for row in rows}
        stays = kept.numpy()
        return {len(row) for row in once.values() if not stays[row.numpy()].all()}

    def widths_after(self, path: str, value: int, side: Side, kept: Tensor, most: int) -> set[int]:
        """Return possible new widths for a number, from the nearest level that has any."""
        matches = [w for w in self._below(path, value) if w.level <= most]
        matches = [w for w in matches if side and w.side == side] or matches
        nearest = min((w.level for w in matches), default=0)
        return {count_kept(w.row, kept) for w in matches if w.level == nearest}


def _depth(path: str) -> int:
    """Return how many levels below the model a module lies.

    >>> [_depth(path) for path in ("", "stem", "blocks.0.conv")]
    [0, 1, 3]
    """
    return path.count(".") + 1 if path else 0


def follow_sizes(
    model: nn.Module, widths: Widths, kept: Tensor, known: Collection[tuple[str, str]]
) -> tuple[list[Attribute], list[StaleSize]]:
    """Find stored numbers that the plan updates, and those that still hold an old width.

    Args:
        model: The model as it is.
        widths: Of its modules.
        kept: Which labels stay.
        known: Attributes that the plan changes already, by module and name.
    """
    followed: list[Attribute] = []
    stale: list[StaleSize] = []
    changed = widths.changed_widths(kept)
    for path, module, name, value in _numbers(model, changed):
        if (path, name) in known:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        named = is_size_name(name) and holds_size(module, name)
        options = [
            widths.widths_after(path, n, _side(name), kept, 99 if named else 1)
            if n in changed
            else {n}
            for n in numbers
        ]
        if all(new_widths <= {n} for new_widths, n in zip(options, numbers, strict=True)):
            continue
        if named and all(len(new_widths) <= 1 for new_widths in options):
            new = tuple(
                next(iter(new_widths), n) for new_widths, n in zip(options, numbers, strict=True)
            )
            followed.append(Attribute(path, name, value, new if value is numbers else new[0]))
        else:
            stale.append(StaleSize(path, name, value))
    return followed, stale


def _numbers(model: nn.Module, changed: set[int]) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield integers, and tuples of them, that modules of the user's classes store."""
    for path, module in modules_by_path(model).items():
        if type(module).__module__.startswith("torch."):
            continue
        for name, value in vars(module).items():
            listed = type(value) in (list, tuple) and all(type(n) is int for n in value)
            if listed and not changed.isdisjoint(value):
                yield path, module, name, tuple(value)
            elif type(value) is int and value in changed:
                yield path, module, name, value


def is_size_name(name: str) -> bool:
    """Tell whether an attribute's name is that of a number of channels.

    >>> [is_size_name(n) for n in ("in_channels", "c1", "self_dim", "kernel_size", "num_classes")]
    [True, True, True, False, False]
    """
    words = _words(name)
    return not words & _NO_SIZES and bool(words & _SIZES)


def _side(name: str) -> Side:
    words = _words(name)
    return "in" if words & _IN else "out" if words & _OUT else ""


def _words(name: str) -> set[str]:
    return set(re.sub(r"[0-9]+", "", name).lower().split("_")) - {""}
