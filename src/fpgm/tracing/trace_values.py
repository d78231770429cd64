"""The records of a trace as values: labels, freeze constraints, equal splits, costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.labels import Fields
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.parameter_roles import Role

Place = tuple[int, str, int]
"""Run, module path and how often the module was called before."""

Join = tuple[Place, str, int]
"""A concatenation: where, in which line of code, and how many ran there before."""


@dataclass
class ParameterInfo:
    """One parameter or buffer: its label fields and the role of each."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    fields: list[Tensor] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    has_labels: bool = False
    open: bool = False
    """Its roles are not known yet: they follow from the uses of what is computed from it."""
    gain: bool = False
    """It is the g of a weight norm."""
    norm_axis: int | None = None
    """It is the v of a weight norm, which takes a norm of each slice along this axis."""

    def name_axes(self, named: Sequence[tuple[Tensor, Role]]) -> None:
        """Label the axes, each with its role."""
        self.has_labels = True
        for labels, role in named:
            if labels.numel() > 1:
                self.fields.append(labels)
                self.roles.append(role)


@dataclass(frozen=True)
class RoleMark:
    """The role an operator gives to labels of a computed weight, and the weight's parameters.

    The parameters of a weight that depends on activations (dynamic convolutions) are not known.
    """

    labels: Tensor
    role: Role
    parameter_ids: frozenset[int]


@dataclass(frozen=True)
class Factor:
    """A tensor whose number of remaining elements a cost is proportional to."""

    fields: Fields
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OpCost:
    """Multiply-accumulates of one operator: a constant times the remaining sizes of its factors."""

    times: int
    factors: tuple[Factor, ...]


def _row(field: Tensor, dim: int) -> Tensor:
    """Return the labels along one dim, at the first position of every other."""
    for other in lb.axes(field):
        if other != dim:
            field = field.narrow(other, 0, 1)
    return field.reshape(-1)


@dataclass(frozen=True)
class FixedSizeOp:
    """An operator whose sizes may be fixed in user code: its output and its input."""

    out: Factor
    source: Factor | None
    pieces: tuple[Tensor, ...] = ()
    safe: bool = False
    line: str = ""

    def rows(self) -> list[Tensor]:
        """List every row of labels whose length may be a number in the code."""
        factors = [factor for factor in (self.out, self.source) if factor is not None]
        whole = [_row(f, d) for factor in factors for f in factor.fields for d in lb.axes(f)]
        return [*self.pieces, *whole]


@dataclass(frozen=True)
class Balance:
    """Blocks of labels, one row each, that must keep equally many; some may be removed entirely."""

    blocks: Tensor
    whole: bool


@dataclass(frozen=True)
class InsertionPoint:
    """Where a plan may insert an adapter: labels at a module's input or output."""

    module: str
    dim: int
    labels: Tensor


@dataclass(frozen=True)
class Move:
    """Channels that an adapter of an earlier plan picks or places by position."""

    adapter: Adapter
    labels: Tensor
    """Labels of the channels picked or placed, in the adapter's order; empty if not known."""
    wide: Tensor | None = None
    """Labels of all channels that are picked from, if they can be removed."""
    stream: Tensor | None = None
    """Labels of all channels among which they are placed."""


@dataclass(frozen=True)
class GroupedOp:
    """A grouped operator: the module that stores the number of groups, and each group's labels."""

    module: str
    blocks: Tensor


@dataclass(frozen=True)
class ParameterSum:
    """Labels of a sum of parameters, those of one of its terms, and the ids of the parameters."""

    out: Tensor
    part: Tensor
    parameter_ids: frozenset[int]


@dataclass(frozen=True)
class FreezeConstraint:
    """Labels that cannot be removed, and the reason."""

    labels: Tensor
    reason: str
    soft: bool
