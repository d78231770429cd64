"""The type of a rule, and the interface of the tracer that calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from fpgm.tracing.labels import Fields
from fpgm.tracing.trace_values import ParameterInfo
from fpgm.utils.parameter_roles import Role

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class LabelTracer(Protocol):
    """The part of a tracer that rules use: labels of tensors, and relations between them."""

    model: nn.Module
    parameter_infos: Mapping[int, ParameterInfo]
    trusts_positions: bool
    may_assume_sizes: bool

    def fields(self, tensor: Tensor) -> Fields:
        """Return a tensor's labels; a parameter without any gets new ones on every axis."""

    def set(self, tensor: Tensor, fields: Sequence[Tensor]) -> None:
        """Label a tensor."""

    def unlabelled_parameter(self, tensor: Tensor) -> ParameterInfo | None:
        """Return the info of a parameter without labels, so that a rule can assign its axes."""

    def has_role(self, tensor: Tensor) -> bool:
        """Tell whether a rule has assigned a parameter's axes."""

    def is_constant(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is computed from parameters and buffers only."""

    def source_parameters(self, tensor: Tensor) -> frozenset[int]:
        """Return the ids of the parameters and buffers a constant tensor is computed from."""

    def has_offset(self, tensor: Tensor) -> bool:
        """Tell whether a constant includes an added term, which keeps it from being zero."""

    def note_constant(self, inputs: Sequence[Tensor], out: Any, offset: bool = False) -> None:
        """Note that a result is computed from these constants only."""

    def is_lifted(self, tensor: Tensor) -> bool:
        """Tell whether a constant may not be zero where the parameters it comes from are."""

    def note_read_by(self, weight: Tensor, labels: Tensor) -> None:
        """Note the labels that a computed weight reads."""

    def scales_gain(self, v: Tensor, g: Tensor) -> bool:
        """Tell whether these two are the parameters of a known weight norm."""

    def is_zero(self, tensor: Tensor) -> bool:
        """Tell whether a unit is zero here once its filter, bias and shifts are zero."""

    def mark_zero(self, tensor: Tensor, zero: bool) -> None:
        """Note whether zeroing a unit's weights makes it zero here."""

    @property
    def module(self) -> str:
        """Return the path of the module whose forward is running."""

    def new_labels(self, count: int) -> Tensor:
        """Return new labels."""

    def constant_labels(self, count: int) -> Tensor:
        """Return new labels for an axis of a constant, which may turn out to hold no channels."""

    def drop_constant(self, field: Tensor) -> bool:
        """Drop an axis of a constant that met one without channels; tell whether it was one."""

    def fixed_labels(self, number: int, count: int) -> Tensor:
        """Return labels for an unlabelled part of a concatenation, which cannot shrink."""

    def end_concat(self) -> None:
        """Note that a concatenation is complete."""

    def relate(self, a: Tensor, b: Tensor) -> None:
        """Relate two fields that are combined, with broadcasting: their units are the same."""

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        """Note that these labels cannot be removed."""

    def tie(self, field: Tensor, dims: Sequence[int]) -> None:
        """Tie labels along these dims: they are removed together."""

    def labels_of(self, inputs: Sequence[Tensor]) -> Any:
        """Return the labels of an operator's inputs, for `check_passed` after its rule."""

    def check_passed(self, name: str, carried: Any, out: Any) -> None:
        """Detect labels that a rule neither passed on nor reported."""

    def on_values_leave(self, tensor: Tensor, method: str) -> None:
        """Handle values that the model's code takes out of torch, where labels cannot follow."""

    def note_stack(self, rows: Tensor) -> None:
        """Note that branches were stacked, one row of labels each."""

    def are_stacked(self, a: Tensor, b: Tensor) -> bool:
        """Tell whether two labels are at the same position of stacked branches."""

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the label of a position where two related fields are combined."""

    def labels_read(self, x: Tensor, weight: Tensor, row: Tensor | None) -> Tensor | None:
        """Return the labels a convolution reads, given those of its input."""

    def note_picked(self, x: Tensor, out: Tensor) -> None:
        """Note that channels were picked out of `x` by position."""

    def at_sum(self, operands: list[Tensor]) -> list[Tensor]:
        """Return the operands of a sum of two activations, before they are added."""

    def note_passed(self, x: Tensor, out: Tensor) -> None:
        """Note that an operator that keeps channels and zeros produced `out` from `x`."""

    def note_overwritten(self, x: Tensor) -> None:
        """Note that `x` was overwritten: what was known about its zeros no longer applies."""

    def balance(self, blocks: Tensor, whole: bool = True) -> None:
        """Require that rows of labels keep equally many; some may be removed entirely (`whole`)."""

    def pair_groups(self, ins: Tensor, outs: Tensor) -> None:
        """Note which labels each group of a grouped operator reads and writes, one row each."""

    def note_role(self, field: Tensor, role: Role, weight: Tensor) -> None:
        """Note the role of a computed weight's field in the operator that uses it."""

    def note_sum_term(self, out: Tensor, part: Tensor, terms: Sequence[Tensor]) -> None:
        """Note that a field of a sum of parameters has the role of a term's field."""

    def note_padding(self, ends: Sequence[Tensor]) -> None:
        """Note that these labels are padding before and after."""

    def note_piece_sizes(self, pieces: Sequence[Tensor]) -> None:
        """Note the pieces whose sizes were passed to the next fixed-size operator."""

    def note_cost(self, times: int, factors: Sequence[tuple[Fields, Sequence[int]]]) -> None:
        """Count multiply-accumulates."""

    def note_grouped_op(self, blocks: Tensor) -> None:
        """Note that a grouped operator ran, with these labels in each group."""

    def note_norm_group(self, size: int) -> None:
        """Note how many channels share a group norm's statistics; pruning must not change it."""

    def slide_along_channels(self, dim: int, labels: Tensor) -> bool:
        """Tell whether a convolution that slides along labels can be given the full width."""

    def note_fixed_size_op(
        self, out: Tensor, source: Tensor | None, dims: Sequence[int] | None
    ) -> None:
        """Note that an operator whose sizes may be fixed in user code computed `out`.

        `source` is its input, if any. The sizes are of these `dims`, or of any if None.
        """


Rule = Callable[[LabelTracer, str, Args, Kwargs, Any], None]
"""Called with the tracer, the operator's name, its arguments and its result."""
