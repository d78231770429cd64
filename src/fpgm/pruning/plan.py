"""The plan: an immutable value that says which indices every tensor keeps, and what is frozen.

A plan is built once from the model, and can be applied later without tracing again. It prints as a
table, converts to JSON and back without loss, and does not depend on torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fpgm.errors import PlanError
from fpgm.pruning.plan_json import PlanDecoder
from fpgm.pruning.plan_text import plan_html, plan_line, plan_text, safe_text
from fpgm.utils.adapter_spec import MAX_DIMS, Adapter, position_problem
from fpgm.utils.parameter_roles import PRODUCER_ROLES, Role, layer_of

FORMAT = 1
"""Version of the JSON layout; raised when an old file would be misread."""


@dataclass(frozen=True)
class Cut:
    """What one parameter or buffer keeps along one dim, in the order the compact model wants it.

    `role` tells masking what the slice means: a `filter` writes a unit, a `shift` adds to it (bias,
    beta, running mean), a `scale` multiplies it, and `reads` is a later layer's view of it. Under
    weight norm the filter is a `direction` times a `gain`; a tied weight may do `both`, write and
    read. With `blocks` > 1 the tensor is a grouped weight: dim 0 consists of that many equal
    blocks, and block b keeps the b-th equal part of `keep`.
    """

    tensor: str
    dim: int
    size: int
    keep: tuple[int, ...]
    role: Role
    blocks: int = 1

    @property
    def kept(self) -> int:
        """Return the new size of the dim."""
        return len(self.keep) // self.blocks

    def removed(self, block: int = 0) -> list[int]:
        """Return the removed indices (in one block of a grouped weight)."""
        share = self.keep[block * self.kept : (block + 1) * self.kept]
        return sorted(set(range(self.size)) - set(share))

    def problem(self) -> str | None:
        """Describe what is invalid, or return None."""
        if self.dim < 0 or self.blocks < 1 or (self.blocks > 1 and self.dim == 0):
            return f"it cuts dim {self.dim} in {self.blocks} blocks"
        if not self.keep or len(self.keep) % self.blocks:
            return f"it keeps {len(self.keep)} channels in {self.blocks} blocks"
        starts = range(0, len(self.keep), self.kept)
        return next(
            (p for b in starts if (p := position_problem(self.keep[b : b + self.kept], self.size))),
            None,
        )


@dataclass(frozen=True)
class Filters:
    """How many filters a layer has, and which of them are kept: by index, or by block."""

    total: int
    keep: tuple[int, ...]
    block: int = 1
    """Filters per block that are kept or removed together; `keep` counts blocks."""

    @property
    def kept(self) -> int:
        """Return how many stay."""
        return len(self.keep) * self.block

    def removed(self) -> list[int]:
        """Return the indices of the removed filters.

        >>> Filters(6, (0, 2), block=2).removed()
        [2, 3]
        """
        stay = set(self.keep)
        return [n for n in range(self.total) if n // self.block not in stay]


@dataclass(frozen=True)
class Attribute:
    """A size a module stores (`out_channels`, `groups`, `split_width`) and its new value."""

    module: str
    name: str
    before: int | tuple[int, ...]
    after: int | tuple[int, ...]

    def problem(self) -> str | None:
        """Describe what is invalid, or return None: sizes only shrink (padding even to zero)."""
        before, after = (v if isinstance(v, tuple) else (v,) for v in (self.before, self.after))
        if (
            isinstance(self.before, int) != isinstance(self.after, int)
            or len(before) != len(after)
            or not all(0 <= new <= old for new, old in zip(after, before, strict=True))
        ):
            return f"its '{safe_text(self.name)}' of {before} becomes {after}"
        return None


@dataclass(frozen=True)
class StaleSize:
    """A number of a module that equals an old width of its layers and was left as it is.

    Nothing in the trace depends on it; code that runs elsewhere (an exporter) may.
    """

    module: str
    name: str
    value: int | tuple[int, ...]

    def problem(self) -> str | None:
        """Describe what is invalid, or return None."""
        return None


@dataclass(frozen=True)
class Cached:
    """A plain attribute in which a forward pass leaves activations that lose channels.

    A cached value is cut along `dim`; values that do not fit, or all if `keep` is empty, are
    dropped.
    """

    module: str
    name: str
    dim: int
    size: int
    keep: tuple[int, ...]

    def problem(self) -> str | None:
        """Describe what is invalid, or return None."""
        if not 0 <= self.dim < MAX_DIMS:
            return f"no activation has a dim {self.dim}"
        return position_problem(self.keep, self.size) if self.keep else None


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
        """Return the fraction of units removed."""
        return 1 - self.kept / self.units

    def problem(self) -> str | None:
        """Describe what is invalid, or return None."""
        if self.units < 1 or not 0 <= self.kept <= self.units:
            return f"it keeps {self.kept} of {self.units} units"
        return None


@dataclass(frozen=True)
class Frozen:
    """Channels that cannot be removed, and the reason."""

    layers: tuple[str, ...]
    channels: int
    reason: str

    def problem(self) -> str | None:
        """Describe what is invalid, or return None."""
        return f"it freezes {self.channels} channels" if self.channels < 0 else None


@dataclass(frozen=True)
class Latency:
    """Latency of one inference in a runtime, for a plan with a latency budget."""

    backend: str
    threads: int
    asked: float
    predicted: float
    """Fraction of the latency removed, as predicted from a table of layer times."""
    measured: float
    """Fraction of the latency removed, original and compact model measured in turns."""
    seconds_before: float
    """Median of the original."""
    seconds_after: float
    """Of the compact model: the median less the fraction measured turn by turn."""
    crowd: str | None = None
    """Why the times are unreliable, if they are, such as load by other processes."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Everything needed to mask, compact, verify and explain; see the module docstring."""

    fingerprint: str
    asked: Mapping[str, Any]
    cuts: tuple[Cut, ...]
    attributes: tuple[Attribute, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    outputs: tuple[Cut, ...] = ()
    """What is kept of the model's outputs, by their number, if they may shrink."""
    groups: tuple[Group, ...] = ()
    frozen: tuple[Frozen, ...] = ()
    macs_before: int = 0
    macs_after: int = 0
    params_before: int = 0
    params_after: int = 0
    notes: tuple[str, ...] = field(default=())
    stale: tuple[StaleSize, ...] = ()
    """Numbers that still hold an old width."""
    cached: tuple[Cached, ...] = ()
    """Where modules cache activations."""
    macs_frozen: int = 0
    """MACs of operators none of whose input and output channels can be removed."""
    latency: Latency | None = None
    """With a latency budget: the predicted and the measured latency."""

    @property
    def macs_removed(self) -> float:
        """Return the fraction of multiply-accumulates removed."""
        return 1 - self.macs_after / self.macs_before if self.macs_before else 0.0

    @property
    def params_removed(self) -> float:
        """Return the fraction of parameters removed."""
        return 1 - self.params_after / self.params_before if self.params_before else 0.0

    @property
    def exact(self) -> bool:
        """Return False if a removed unit took part in a norm over channels (`approximate`)."""
        return all(group.exact for group in self.groups if group.kept < group.units)

    def filters(self) -> dict[str, Filters]:
        """Return the filters of every layer that loses some, by layer path and tensor name.

        The path is that of the first of a module's tensors.

        >>> cut = Cut("up.weight", 1, 3, (0, 2, 1, 2), "filter", blocks=2)  # two groups of three
        >>> Plan("", {}, (cut,)).filters()["up"].removed()
        [1, 3]
        """
        filters: dict[str, Filters] = {}
        for cut in self.cuts:
            if cut.role in PRODUCER_ROLES:
                keep = (
                    place + number // cut.kept * cut.size for number, place in enumerate(cut.keep)
                )
                layer_filters = Filters(cut.blocks * cut.size, tuple(keep))
                filters.setdefault(layer_of(cut.tensor), layer_filters)
                filters.setdefault(cut.tensor, layer_filters)
        return self._whole_groups() | filters

    def _whole_groups(self) -> dict[str, Filters]:
        """Return the filters of transposed convolutions that lose whole groups.

        Their rows are what they read, and all filters of a group go with its rows.
        """
        sizes = {
            (a.module, a.name): (a.before, a.after)
            for a in self.attributes
            if isinstance(a.before, int) and isinstance(a.after, int)
        }
        filters = {}
        for cut in self.cuts:
            layer = layer_of(cut.tensor)
            groups, _ = sizes.get((layer, "groups"), (0, 0))
            before, after = sizes.get((layer, "out_channels"), (0, 0))
            if cut.role != "reads" or cut.dim != 0 or not 0 < groups <= min(cut.size, before):
                continue
            rows, wide = cut.size // groups, before // groups
            alive = sorted({place // rows for place in cut.keep})
            if len(alive) * wide == after:
                filters[layer] = filters[cut.tensor] = Filters(before, tuple(alive), wide)
        return filters

    def __deepcopy__(self, memo: object) -> Plan:
        return self  # nothing in it can change, and every compact model carries one

    def to_json(self, indent: int | None = None) -> str:
        """Return JSON text from which `from_json` builds an equal plan."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; raise `PlanError` for anything else."""
        try:
            return cls._from_dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"This is not a plan: {error}.") from error

    @classmethod
    def _from_dict(cls, raw: Any) -> Plan:
        if not isinstance(raw, dict) or "format" not in raw:
            raise PlanError("This is not a plan: no 'format' field.")
        if raw.pop("format") != FORMAT:
            raise PlanError(f"The plan is not in format {FORMAT}: update fpgm.")
        plan = PlanDecoder().record(cls, raw)
        if (problem := _problem(plan)) is not None:
            raise PlanError(f"This is not a plan: {problem}.")
        return plan

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        return f"Plan({plan_line(self)})"

    def _repr_html_(self) -> str:
        return plan_html(self)


def _problem(plan: Plan) -> str | None:
    """Describe what is invalid in a plan as a whole, or return None."""
    if min(plan.macs_before, plan.macs_after, plan.params_before, plan.params_after) < 0:
        return "it has a negative number of operations or parameters"
    if plan.latency is not None and plan.latency.threads < 1:
        return f"its time was measured with {plan.latency.threads} threads"
    if others := [c.tensor for c in plan.outputs if not re.fullmatch("[0-9]{1,6}", c.tensor)]:
        return f"the model has no output '{safe_text(others[0])}'"
    return None
