"""What a rule is, and what it may ask of and tell the tracer that calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from fpgm.tracing.constraints import Slot
from fpgm.tracing.labels import Fields
from fpgm.utils.parameter_info import Role

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class LabelTracer(Protocol):
    """The part of a tracer that rules use: labels of tensors, and what they find out about them."""

    model: nn.Module
    slots: Mapping[int, Slot]
    trusts_positions: bool
    assumes: bool

    def fields(self, tensor: Tensor) -> Fields:
        """Labels of a tensor; a parameter seen for the first time gets fresh ones on every axis."""

    def set(self, tensor: Tensor, fields: Sequence[Tensor]) -> None:
        """Label a tensor."""

    def untouched(self, tensor: Tensor) -> Slot | None:
        """Return the info of a parameter that has no labels yet: a rule may name its axes."""

    def has_role(self, tensor: Tensor) -> bool:
        """Whether a rule has named the axes of a parameter, so its labels are another's too."""

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of parameters and buffers only."""

    def made_of(self, tensor: Tensor) -> frozenset[int]:
        """Ids of the parameters and buffers a constant tensor is computed from."""

    def has_offset(self, tensor: Tensor) -> bool:
        """Whether something was added on the way to a constant, which keeps it from being zero."""

    def note_constant(self, inputs: Sequence[Tensor], out: Any, offset: bool = False) -> None:
        """A result is made of nothing but these constants."""

    def scales_gain(self, v: Tensor, g: Tensor) -> bool:
        """Whether masking and compacting know that these two are a weight norm's."""

    def is_zero(self, tensor: Tensor) -> bool:
        """Whether a unit is zero here once its filter, bias and shifts are."""

    def mark_zero(self, tensor: Tensor, zero: bool) -> None:
        """Note whether zeroing a unit's weights makes it zero here."""

    @property
    def module(self) -> str:
        """Path of the module whose forward is running."""

    def fresh(self, count: int) -> Tensor:
        """New labels."""

    def fixed(self, number: int, count: int) -> Tensor:
        """Labels for an unlabelled part of a concatenation, which cannot shrink."""

    def joined(self) -> None:
        """A concatenation is done."""

    def relate(self, a: Tensor, b: Tensor) -> None:
        """Positions of two fields meet (with broadcasting): they belong to the same units."""

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        """These labels cannot be removed."""

    def tie(self, field: Tensor, dims: Sequence[int]) -> None:
        """Labels along these dims go together."""

    def carried(self, inputs: Sequence[Tensor]) -> Any:
        """What an operator's inputs carry, for `check_passed` after its rule."""

    def check_passed(self, name: str, carried: Any, out: Any) -> None:
        """Notice labels that a rule neither passed on nor said anything about."""

    def leaves(self, tensor: Tensor, method: str) -> None:
        """The model's code takes values out of torch, where labels cannot follow."""

    def stacked(self, rows: Tensor) -> None:
        """Branches were stacked, one row of labels each."""

    def stacks(self, a: Tensor, b: Tensor) -> bool:
        """Whether two labels are at the same position of branches that were stacked."""

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        """The label of a position where two related fields meet."""

    def reading(self, x: Tensor, weight: Tensor, row: Tensor | None) -> Tensor | None:
        """The labels a convolution reads, given those its input carries."""

    def picked(self, x: Tensor, out: Tensor) -> None:
        """Channels were picked out of `x` by position."""

    def at_sum(self, operands: list[Tensor]) -> list[Tensor]:
        """Two activations are about to be added."""

    def passed(self, x: Tensor, out: Tensor) -> None:
        """An operator that keeps channels and zeros produced `out` from `x`."""

    def mixed(self, x: Tensor) -> None:
        """Something else was written into `x`: what was known of its zeros no longer holds."""

    def balance(self, blocks: Tensor, whole: bool = True) -> None:
        """Rows of labels must keep equally many; some may go `whole` where they are counted."""

    def paired(self, ins: Tensor, outs: Tensor) -> None:
        """What each group of a grouped operator reads and writes, one row a group."""

    def role(self, field: Tensor, role: Role, weight: Tensor) -> None:
        """What a field of a tensor made of parameters means to the operator that uses it."""

    def added(self, out: Tensor, part: Tensor, terms: Sequence[Tensor]) -> None:
        """A field of a sum of parameters (`terms`), and one of a term: they have the same role."""

    def padded(self, ends: Sequence[Tensor]) -> None:
        """These labels stand for padding before and after."""

    def sized(self, pieces: Sequence[Tensor]) -> None:
        """The next risky operator was given the sizes of these pieces."""

    def work(self, times: int, factors: Sequence[tuple[Fields, Sequence[int]]]) -> None:
        """Count multiply-accumulates."""

    def grouped(self, blocks: Tensor) -> None:
        """A grouped operator ran, with these labels in each group."""

    def window(self, dim: int, labels: Tensor) -> bool:
        """A convolution slides along a labelled axis; whether it can be given the full width."""

    def risky(self, out: Tensor, source: Tensor | None) -> None:
        """An operator whose sizes may be fixed in the user's code made `out`, maybe of `source`."""


Rule = Callable[[LabelTracer, str, Args, Kwargs, Any], None]
"""Called with the tracer, the operator's name, its arguments and its result."""
