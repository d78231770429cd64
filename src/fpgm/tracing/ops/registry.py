"""One table from ATen operator to what it does to labels.

A rule receives the tracer, the call and its result; it reads the labels of the arguments, tells
the tracer what it found (`relate`, `tie`, `balance`, `freeze`, `work`) and labels the result. An
operator that is in no table is never guessed at: the labels that reach it are frozen, with its
name as the reason. `TABLE` can be queried for what is supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from fpgm.tracing import labels as lb
from fpgm.tracing.ops import conv_matmul as contract
from fpgm.tracing.ops import elementwise as pointwise
from fpgm.tracing.ops import embedding, fake_quant, fft, fixed_kernel, recurrent
from fpgm.tracing.ops import factory as create
from fpgm.tracing.ops import movement as move
from fpgm.tracing.ops import norm as normalise
from fpgm.tracing.ops import reduction as reduce
from fpgm.tracing.ops import slice_concat as pieces
from fpgm.tracing.ops import sort_gather as sorting
from fpgm.tracing.ops import spatial as space
from fpgm.tracing.ops import unfold as patches
from fpgm.tracing.ops import zero_tracking as zeros
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.norm import weight_norm as weight_norm

TABLE: dict[str, Rule] = {
    **move.RULES,
    **pieces.RULES,
    **create.RULES,
    **pointwise.RULES,
    **contract.RULES,
    **normalise.RULES,
    **reduce.RULES,
    **space.RULES,
    **sorting.RULES,
    **patches.RULES,
    **fft.RULES,
    **embedding.RULES,
    **recurrent.RULES,
    **fake_quant.RULES,
    **fixed_kernel.RULES,
}

RISKY = move.RISKY | pieces.RISKY | create.RISKY
"""Operators whose sizes may be constants of the user's code; the tracer is told what they made."""

_ENDS = {"convolution", "mm", "bmm", "addmm", "baddbmm", *create.RULES} - {"equal"}
"""Operators at which labels rightly end: a weight reads them, or nothing but shapes is read."""

_OFFSETS = {"add", "clamp", "clamp_min", "maximum", "exp", "sigmoid", "softplus"}

_found: dict[Any, tuple[str, Rule]] = {}


def apply(
    tracer: LabelTracer,
    func: Any,
    args: Args,
    kwargs: Kwargs,
    out: Any,
    inputs: Sequence[Tensor],
) -> None:
    """Let the operator's rule move labels from its arguments (`inputs`: the tensors) to `out`."""
    found = _found.get(func)
    if found is None:
        found = _found[func] = _look_up(func)
    name, rule = found
    if name in _ENDS:
        rule(tracer, name, args, kwargs, out)
    else:
        carried = tracer.carried(inputs)
        rule(tracer, name, args, kwargs, out)
        tracer.check_passed(name, carried, out)
    results = tensors((out,))
    if name in RISKY:
        source = args[0] if args and isinstance(args[0], Tensor) else None
        for result in results:
            tracer.risky(result, source)
    for result in results:
        tracer.mark_zero(result, zeros.after(tracer, name, inputs, result))


def tensors(values: Any) -> list[Tensor]:
    """Tensors among the arguments, lists included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors(value)
    return found


def name_of(func: Any) -> str:
    """Name of an operator, without torch's own namespace.

    >>> name_of(torch.ops.aten.relu_.default)
    'relu_'
    """
    if isinstance(func, HigherOrderOperator):
        return f"torch.{func.name()}"
    name: str = func._schema.name
    return name.removeprefix("aten::")


def adds_offset(func: Any) -> bool:
    """Whether an operator's result may not be zero where its first operand is."""
    return name_of(func).removesuffix("_") in _OFFSETS


def _look_up(func: Any) -> tuple[str, Rule]:
    name = name_of(func)
    if isinstance(func, HigherOrderOperator):
        return name, _unknown
    for candidate in (f"{name}.{func._overloadname}", name, name.removesuffix("_")):
        if candidate in TABLE:
            return name, TABLE[candidate]
    if torch.Tag.pointwise in func.tags or _is_pointwise(name.removesuffix("_")):
        return name, pointwise.combine
    return name, _unknown


def _is_pointwise(name: str) -> bool:
    """Whether torch marks an operator of this name so; of `gelu_` and others it forgot to."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _unknown(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    for tensor in tensors((*args, *kwargs.values())):
        tracer.freeze(tracer.fields(tensor), f"'{name}' has no pruning rule")
    for result in tensors((out,)):  # an input that was resized in place has no labels that fit
        fits = [f for f in tracer.fields(result) if lb.fits(f, tuple(result.shape))]
        tracer.set(result, fits)
