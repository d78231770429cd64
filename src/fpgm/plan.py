"""The plan: an immutable value that says which tensor keeps which indices, and why the rest stays.

A plan is made once, by looking at the model, and applies without looking again. It prints as a
table, goes to JSON and back unchanged, and knows nothing of torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fpgm.errors import PlanError
from fpgm.wording import figure, shorten

FORMAT = 1
"""Version of the JSON layout; raised when an old file would be misread."""

Role = Literal["filter", "depthwise", "both", "direction", "gain", "shift", "scale", "reads"]
WRITES: tuple[Role, ...] = ("filter", "depthwise", "both", "direction")
"""Roles of an axis whose rows are filters."""
Side = Literal["input", "output"]
Kind = Literal["gather", "scatter"]


@dataclass(frozen=True)
class Cut:
    """What one parameter or buffer keeps along one dim, in the order the compact model wants it.

    `role` tells masking what the slice means: a `filter` writes a unit, a `shift` adds to it
    (bias, beta, running mean), a `scale` multiplies it, and `reads` is a later layer's view of it.
    Under weight norm the filter is a `direction` times a `gain`; a tied weight may do `both`, write
    and read.
    With `blocks` > 1 the tensor is a grouped weight: dim 0 falls into that many equal blocks, and
    block b keeps its own share, the b-th equal part of `keep`.
    """

    tensor: str
    dim: int
    size: int
    keep: tuple[int, ...]
    role: Role
    blocks: int = 1

    @property
    def kept(self) -> int:
        """New size of the dim."""
        return len(self.keep) // self.blocks

    def removed(self, block: int = 0) -> list[int]:
        """Indices that go (in one block of a grouped weight)."""
        share = self.keep[block * self.kept : (block + 1) * self.kept]
        return sorted(set(range(self.size)) - set(share))


@dataclass(frozen=True)
class Filters:
    """How many filters a layer has, and which of them stay: by number, or by block of equals."""

    total: int
    keep: tuple[int, ...]
    block: int = 1
    """So many filters in a row go or stay together; `keep` counts blocks."""

    @property
    def kept(self) -> int:
        """How many stay."""
        return len(self.keep) * self.block

    def removed(self) -> list[int]:
        """Numbers of those that go.

        >>> Filters(6, (0, 2), block=2).removed()
        [2, 3]
        """
        stay = set(self.keep)
        return [n for n in range(self.total) if n // self.block not in stay]


@dataclass(frozen=True)
class Attribute:
    """A size a module remembers (`out_channels`, `groups`, `split_width`) and its new value."""

    module: str
    name: str
    before: int | tuple[int, ...]
    after: int | tuple[int, ...]


@dataclass(frozen=True)
class Adapter:
    """A gather or scatter of channels at a module's input or output.

    `gather` picks `index` along `dim`; `scatter` writes into zeros of `size` at `index`. They stand
    where the user's own code fixes a width (zero-padded shortcuts, shuffles, full-width streams).
    """

    module: str
    side: Side
    kind: Kind
    dim: int
    index: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Group:
    """Units of one or several layers that are chosen together, before and after."""

    name: str
    layers: tuple[str, ...]
    units: int
    kept: int
    exact: bool = True

    @property
    def rate(self) -> float:
        """Share of units removed."""
        return 1 - self.kept / self.units


@dataclass(frozen=True)
class Frozen:
    """Channels that are left alone, and a reason a person understands."""

    layers: tuple[str, ...]
    channels: int
    reason: str


@dataclass(frozen=True)
class Latency:
    """Time of one inference in a runtime, where a share of it was asked to go."""

    backend: str
    threads: int
    asked: float
    predicted: float
    """Share of the time that goes according to a table of layers' times."""
    measured: float
    """Share of the time that goes, original and compact model measured in turns."""
    seconds_before: float
    """Of the original, in the median."""
    seconds_after: float
    """Of the compact model: that, less the share measured turn by turn."""


@dataclass(frozen=True)
class Plan:
    """Everything needed to mask, compact, verify and explain; see the module docstring."""

    fingerprint: str
    asked: Mapping[str, Any]
    cuts: tuple[Cut, ...]
    attributes: tuple[Attribute, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    outputs: tuple[Cut, ...] = ()
    """What is left of the model's outputs, by their number, where the user lets them shrink."""
    groups: tuple[Group, ...] = ()
    frozen: tuple[Frozen, ...] = ()
    macs_before: int = 0
    macs_after: int = 0
    params_before: int = 0
    params_after: int = 0
    notes: tuple[str, ...] = field(default=())
    latency: Latency | None = None
    """If a share of the time was asked for: what was predicted and what was measured."""

    @property
    def macs_removed(self) -> float:
        """Share of multiply-accumulates removed."""
        return 1 - self.macs_after / self.macs_before if self.macs_before else 0.0

    @property
    def params_removed(self) -> float:
        """Share of parameters removed."""
        return 1 - self.params_after / self.params_before if self.params_before else 0.0

    @property
    def exact(self) -> bool:
        """False when a removed unit took part in a norm over channels (asked for, approximate)."""
        return all(group.exact for group in self.groups if group.kept < group.units)

    def filters(self) -> dict[str, Filters]:
        """Filters of every layer that loses some, by the layer's path and the tensor's name.

        Under either there is one answer; the path is that of the first of a module's tensors.

        >>> cut = Cut("up.weight", 1, 3, (0, 2, 1, 2), "filter", blocks=2)  # two groups of three
        >>> Plan("", {}, (cut,)).filters()["up"].removed()
        [1, 3]
        """
        found: dict[str, Filters] = {}
        for cut in self.cuts:
            if cut.role in WRITES:
                keep = (
                    place + number // cut.kept * cut.size for number, place in enumerate(cut.keep)
                )
                own = Filters(cut.blocks * cut.size, tuple(keep))
                found.setdefault(layer_of(cut.tensor), own)
                found.setdefault(cut.tensor, own)
        return self._whole_groups() | found

    def _whole_groups(self) -> dict[str, Filters]:
        """Filters of transposed convolutions that lose whole groups.

        Their rows are what they read, and all filters of a group go with its rows.
        """
        sizes = {
            (a.module, a.name): (a.before, a.after)
            for a in self.attributes
            if isinstance(a.before, int) and isinstance(a.after, int)
        }
        found = {}
        for cut in self.cuts:
            layer = layer_of(cut.tensor)
            groups, _ = sizes.get((layer, "groups"), (0, 0))
            before, after = sizes.get((layer, "out_channels"), (0, 0))
            if cut.role != "reads" or cut.dim != 0 or not 0 < groups <= min(cut.size, before):
                continue
            rows, wide = cut.size // groups, before // groups
            alive = sorted({place // rows for place in cut.keep})
            if len(alive) * wide == after:
                found[layer] = found[cut.tensor] = Filters(before, tuple(alive), wide)
        return found

    def __deepcopy__(self, memo: object) -> Plan:
        return self  # nothing in it can change, and every compact model carries one

    def to_json(self, indent: int | None = None) -> str:
        """JSON text from which `from_json` makes an equal plan."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; anything else is a `PlanError`."""
        try:
            return cls._from_dict(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"This is not a plan: {error}.") from error

    @classmethod
    def _from_dict(cls, raw: Any) -> Plan:
        if not isinstance(raw, dict) or "format" not in raw:
            raise PlanError("This is not a plan: no 'format' field.")
        if raw.pop("format") != FORMAT:
            raise PlanError(f"The plan is in another format than {FORMAT}: update fpgm.")
        parts: dict[str, type] = {
            "cuts": Cut,
            "attributes": Attribute,
            "adapters": Adapter,
            "outputs": Cut,
            "groups": Group,
            "frozen": Frozen,
        }
        values: dict[str, Any] = {
            key: tuple(_rebuild(parts[key], item) for item in value) if key in parts else value
            for key, value in raw.items()
        }
        values["notes"] = tuple(values.get("notes", ()))
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise PlanError(f"This is not a plan: no plan has {sorted(unknown)[0]!r}.")
        if values.get("latency") is not None:
            values["latency"] = _rebuild(Latency, values["latency"])
        _check_kinds(cls, values)
        return cls(**values)

    def __str__(self) -> str:
        rows = [
            (g.name, str(len(g.layers)), f"{g.units} → {g.kept}", f"{g.rate:.0%}", _exactness(g))
            for g in self.groups
        ]
        lines = [_table(("group", "layers", "units", "removed", ""), rows)]
        lines += [
            f"MACs   {self.macs_before:,} → {self.macs_after:,}  (−{self.macs_removed:.1%})",
            f"params {self.params_before:,} → {self.params_after:,}  (−{self.params_removed:.1%})",
        ]
        if self.latency is not None:
            lines.append(_timed(self.latency))
        lines += [
            f"frozen {shorten(f.layers)} ({f.channels} channels): {f.reason}" for f in self.frozen
        ]
        lines += [f"note   {note}" for note in self.notes]
        return "\n".join(lines)


def layer_of(tensor: str) -> str:
    """Path of the module that owns a tensor, however the tensor is made up.

    >>> layer_of("a.conv.weight"), layer_of("a.conv.parametrizations.weight.original1")
    ('a.conv', 'a.conv')
    >>> layer_of("weight")  # of a model that is one layer
    'weight'
    """
    owner = tensor.rpartition(".")[0]
    before, found, _ = owner.rpartition("parametrizations.")
    if found and (not before or before.endswith(".")):
        owner = before.rstrip(".")
    return owner or tensor


def _rebuild(kind: type, item: Mapping[str, Any]) -> Any:
    """A value from what JSON holds, if that is of the right kinds and can be meant."""
    known = {f.name for f in fields(kind)}
    if unknown := set(item) - known:
        raise PlanError(f"This is not a plan: {kind.__name__} has no {sorted(unknown)[0]!r}.")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
    _check_kinds(kind, values)
    made = kind(**values)
    if isinstance(made, Cut | Adapter) and not _can_be_meant(made):
        name = made.tensor if isinstance(made, Cut) else made.module
        raise PlanError(f"This is not a plan: what it says about '{name}' cannot be meant.")
    return made


def _can_be_meant(part: Cut | Adapter) -> bool:
    """Whether positions are within the size."""
    if isinstance(part, Adapter):
        inside = all(0 <= i < part.size for i in part.index)
        return part.dim >= 0 and part.size > 0 and inside
    return (
        part.dim >= 0
        and (part.blocks == 1 or (part.blocks > 1 and part.dim > 0))
        and len(part.keep) % part.blocks == 0
        and bool(part.keep)
        and all(0 <= i < part.size for i in part.keep)
        and all(
            len(set(part.keep[b * part.kept : (b + 1) * part.kept])) == part.kept
            for b in range(part.blocks)
        )
    )


@cache
def _kinds(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check_kinds(kind: type, values: Mapping[str, Any]) -> None:
    for name, hint in _kinds(kind).items():
        if name in values and not _is_a(values[name], hint):
            raise PlanError(f"This is not a plan: '{name}' of a {kind.__name__} is of no use.")


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated kind, for the few kinds a plan is made of.

    >>> _is_a((1, 2), tuple[int, ...]), _is_a((1, "2"), tuple[int, ...]), _is_a(True, int)
    (True, False, False)
    """
    inside = get_args(hint)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in inside
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_a(item, inside[0]) for item in value)
    if inside and get_origin(hint) is not Mapping:
        return any(_is_a(value, one) for one in inside)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


def _timed(found: Latency) -> str:
    before, after = 1000 * found.seconds_before, 1000 * found.seconds_after
    return (
        f"time   {figure(before)} ms → {figure(after)} ms  (−{found.measured:.1%}; asked "
        f"{found.asked:.1%}, predicted {found.predicted:.1%}; {found.backend}, threads: "
        f"{found.threads})"
    )


def _exactness(group: Group) -> str:
    return "" if group.exact else "approximate"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
