"""The table from ATen operators to their effect on labels.

A rule receives the tracer, the call and its result. It reads the labels of the arguments, reports
relations to the tracer (`relate`, `tie`, `balance`, `freeze`, `note_cost`) and labels the result.
Nothing is guessed: labels that reach an operator without a rule are frozen, with its name in the
reason. `TABLE` shows what is supported. A new rule goes into `RULES` of the file of its kind, as in
`elementwise`; this file merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from fpgm.tracing import labels as lb
from fpgm.tracing.ops import (
    conv_matmul,
    elementwise,
    embedding,
    expand_repeat,
    factory,
    fake_quant,
    fft,
    movement,
    norm,
    recurrent,
    reduction,
    slice_concat,
    sort_gather,
    spatial,
    unfold,
    zero_tracking,
)
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.norm import weight_norm as weight_norm

TABLE: dict[str, Rule] = {
    **movement.RULES,
    **slice_concat.RULES,
    **factory.RULES,
    **elementwise.RULES,
    **conv_matmul.RULES,
    **norm.RULES,
    **reduction.RULES,
    **spatial.RULES,
    **sort_gather.RULES,
    **unfold.RULES,
    **fft.RULES,
    **embedding.RULES,
    **recurrent.RULES,
    **fake_quant.RULES,
    **expand_repeat.RULES,
}

FIXED_SIZE_OPS = movement.FIXED_SIZE_OPS | slice_concat.FIXED_SIZE_OPS | factory.FIXED_SIZE_OPS
"""Operators whose sizes may be constants in the user's code; the tracer records them."""

_ENDS = {"convolution", "mm", "bmm", "addmm", "baddbmm", "_sparse_addmm", *factory.RULES} - {
    "equal"
}
"""Operators at which labels rightly end: a weight reads them, or nothing but shapes is read."""

_OFFSETS = {"add", "clamp", "clamp_min", "maximum", "exp", "sigmoid", "softplus"}

_rules_by_func: dict[Any, tuple[str, Rule]] = {}


def apply(
    tracer: LabelTracer,
    func: Any,
    args: Args,
    kwargs: Kwargs,
    out: Any,
    inputs: Sequence[Tensor],
) -> None:
    """Let the operator's rule move labels from its arguments to `out`.

    Args:
        tracer: Holds the labels and receives what the rule reports.
        func: The ATen operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: Its result.
        inputs: All tensors among the arguments.
    """
    entry = _rules_by_func.get(func)
    if entry is None:
        entry = _rules_by_func[func] = _look_up(func)
    name, rule = entry
    if name in _ENDS:
        rule(tracer, name, args, kwargs, out)
    else:
        carried = tracer.labels_of(inputs)
        rule(tracer, name, args, kwargs, out)
        tracer.check_passed(name, carried, out)
    results = [out] if isinstance(out, Tensor) else tensors((out,))
    if name in FIXED_SIZE_OPS:
        source = args[0] if args and isinstance(args[0], Tensor) else None
        dims = slice_concat.sized_dims(name, args)
        for result in results:
            tracer.note_fixed_size_op(result, source, dims)
    if results:  # of several results, as of a batch norm, the first one decides
        zero = zero_tracking.zero_after(tracer, name, inputs, results[0])
        for result in results:
            tracer.mark_zero(result, zero)


def tensors(values: Any) -> list[Tensor]:
    """List the tensors among the arguments, also inside lists."""
    result: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            result.append(value)
        elif type(value) not in _PLAIN and isinstance(value, list | tuple):
            result += tensors(value)
    return result


_PLAIN = frozenset((int, float, bool, str, type(None)))


def name_of(func: Any) -> str:
    """Return the name of an operator, without torch's own namespace.

    >>> name_of(torch.ops.aten.relu_.default)
    'relu_'
    """
    if isinstance(func, HigherOrderOperator):
        return f"torch.{func.name()}"
    return _schema_name(func)


@cache
def _schema_name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def adds_offset(func: Any) -> bool:
    """Tell whether an operator's result may not be zero where its first operand is."""
    return name_of(func).removesuffix("_") in _OFFSETS


def lifts_zeros(
    tracer: LabelTracer, func: Any, args: Args, inputs: Sequence[Tensor], out: Any
) -> bool:
    """Tell whether a result of constants may not be zero where the parameters are."""
    if isinstance(func, HigherOrderOperator):
        return True
    return not zero_tracking.keeps_zeros(tracer, name_of(func), args, inputs, out)


def _look_up(func: Any) -> tuple[str, Rule]:
    name = name_of(func)
    if isinstance(func, HigherOrderOperator):
        return name, _unknown
    for candidate in (f"{name}.{func._overloadname}", name, name.removesuffix("_")):
        if candidate in TABLE:
            return name, TABLE[candidate]
    if torch.Tag.pointwise in func.tags or _is_pointwise(name.removesuffix("_")):
        return name, elementwise.combine
    return name, _unknown


def _is_pointwise(name: str) -> bool:
    """Tell whether torch marks an operator of this name so; of `gelu_` and others it forgot to."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _unknown(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    give_up(tracer, f"'{name}' has no pruning rule", (*args, *kwargs.values()), out)


def give_up(tracer: LabelTracer, reason: str, args: Args, out: Any) -> None:
    """Freeze all channels that reach an operator; what it returns has none."""
    for tensor in tensors(args):
        tracer.freeze(tracer.fields(tensor), reason)
    for result in tensors((out,)):  # an input that was resized in place has no labels that fit
        fits = [f for f in tracer.fields(result) if lb.fits(f, tuple(result.shape))]
        tracer.set(result, fits)
