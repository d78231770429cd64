"""What watching a model finds, as values: what tensors carry, what must stay, what must match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.labels import Fields
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.parameter_info import Role

Place = tuple[int, str, int]
"""Run, module path and how often the module was called before."""

Join = tuple[Place, str, int]
"""A concatenation: where, in which line of code, and how many ran there before."""


@dataclass
class Slot:
    """What is known of one parameter or buffer: its fields and what each of them means."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    fields: list[Tensor] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    seen: bool = False
    open: bool = False
    """Its labels are its own and its roles not yet known: uses of what is computed from it tell."""
    gain: bool = False
    """It is the g of a weight norm."""
    norm_axis: int | None = None
    """It is the v of a weight norm, which takes a norm of each slice along this axis."""

    def name_axes(self, named: Sequence[tuple[Tensor, Role]]) -> None:
        """Label the axes, each with its role."""
        self.seen = True
        for labels, role in named:
            if labels.numel() > 1:
                self.fields.append(labels)
                self.roles.append(role)


@dataclass(frozen=True)
class RoleMark:
    """What an operator does with labels of a computed weight, and the slots it is made of.

    Of a weight that activations helped to make (dynamic convolutions) no slots are known.
    """

    labels: Tensor
    role: Role
    slots: frozenset[int]


@dataclass(frozen=True)
class Factor:
    """A tensor whose number of remaining elements a cost is proportional to."""

    fields: Fields
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """Multiply-accumulates of one operator: a constant times what remains of its factors."""

    times: int
    factors: tuple[Factor, ...]


def _row(field: Tensor, dim: int) -> Tensor:
    """The labels along one dim, at the first place of every other."""
    for other in lb.axes(field):
        if other != dim:
            field = field.narrow(other, 0, 1)
    return field.reshape(-1)


@dataclass(frozen=True)
class Risk:
    """What an operator with possibly fixed sizes made, and of what."""

    out: Factor
    source: Factor | None
    pieces: tuple[Tensor, ...] = ()
    safe: bool = False
    line: str = ""

    def rows(self) -> list[Tensor]:
        """Every row of labels whose length a number in the code could stand for."""
        factors = [factor for factor in (self.out, self.source) if factor is not None]
        whole = [_row(f, d) for factor in factors for f in factor.fields for d in lb.axes(f)]
        return [*self.pieces, *whole]


@dataclass(frozen=True)
class Balance:
    """Blocks of labels, one row each, that must keep equally many, or go whole if they may."""

    blocks: Tensor
    whole: bool


@dataclass(frozen=True)
class Site:
    """Labels at a module's border: scattered into a stream, picked from it, or slid along (ECA)."""

    module: str
    dim: int
    labels: Tensor


@dataclass(frozen=True)
class Move:
    """Channels that an adapter of an earlier plan picks or places by position."""

    adapter: Adapter
    labels: Tensor
    """Of the channels picked or placed, in the adapter's order; none if nothing is known."""
    wide: Tensor | None = None
    """Of all channels that are picked from, where they can become fewer."""
    stream: Tensor | None = None
    """Of all channels among which they are placed."""


@dataclass(frozen=True)
class Grouped:
    """A grouped operator: which module remembers the number of groups, and each group's labels."""

    module: str
    blocks: Tensor


@dataclass(frozen=True)
class Sum:
    """Labels of a sum of parameters, those of one of its terms, and the slots all are made of."""

    out: Tensor
    part: Tensor
    slots: frozenset[int]


@dataclass(frozen=True)
class Stop:
    """Labels that must stay, and why."""

    labels: Tensor
    reason: str
    soft: bool
