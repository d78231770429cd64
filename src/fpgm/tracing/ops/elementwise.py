"""Element-wise operators: positions that are combined belong to the same units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.labels import Fields
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule

_KEEPS_ZERO = {
    "relu",
    "gelu",
    "silu",
    "leaky_relu",
    "tanh",
    "hardswish",
    "clone",
    "neg",
    "abs",
    "_prelu_kernel",
    "native_dropout",
    "elu",
    "celu",
    "selu",
    "mish",
    "rrelu_with_noise",
}
"""Functions with f(0) = 0: a channel that is zero before is zero after."""


_PRODUCTS = {"mul", "div", "_prelu_kernel", "masked_fill"}
"""A result that is zero where one operand is, its weight; of others every operand must be."""


def combine(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Relate the operands' labels position by position, with broadcasting."""
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim > 0]
    if not isinstance(out, Tensor) or not operands:
        return
    if name in ("div", "div_") and len(operands) == 2:
        _freeze_own_norm(tracer, *operands)
    if name.startswith("add") and len(operands) == 2:
        _mark_shifts(tracer, operands)
        operands = tracer.at_sum(operands)
    tracer.set(out, combine_fields(tracer, operands, tuple(out.shape)))
    if len(operands) > 1 and name.removesuffix("_") not in _PRODUCTS:
        note_sum(tracer, operands, [tracer.fields(x) for x in operands], out)
    if len(operands) > 1 and any(out is x for x in operands):
        tracer.note_overwritten(out)
    if (len(operands) == 1 or name == "_prelu_kernel") and name.removesuffix("_") in _KEEPS_ZERO:
        tracer.note_passed(operands[0], out)


def _freeze_own_norm(tracer: LabelTracer, weight: Tensor, norm: Tensor) -> None:
    """Freeze a weight divided by its own norm: masking a filter would give 0 / 0."""
    shared = tracer.source_parameters(weight) & tracer.source_parameters(norm)
    if shared and tracer.is_constant(weight) and not tracer.has_offset(norm):
        tracer.freeze(
            tracer.fields(norm),
            "a weight is divided by its own norm (use torch's weight_norm, or add an epsilon)",
        )


def note_sum(
    tracer: LabelTracer, operands: Sequence[Tensor], terms: Sequence[Fields], out: Tensor
) -> None:
    """Note that each term of a sum of weights has the roles of the sum."""
    if all(map(tracer.is_constant, operands)):
        for field in tracer.fields(out):
            for term in (f for fields in terms for f in fields):
                part = lb.lift(term, out.ndim)
                if lb.varies(part, lb.axes(field)):
                    tracer.note_sum_term(field, part, operands)


def _mark_shifts(tracer: LabelTracer, operands: Sequence[Tensor]) -> None:
    for tensor in operands:
        info = tracer.parameter_infos.get(id(tensor))
        if info is not None:
            tracer.fields(tensor)
            info.roles = ["shift" if role == "scale" else role for role in info.roles]


def combine_fields(
    tracer: LabelTracer, operands: Sequence[Tensor], shape: tuple[int, ...]
) -> Fields:
    """Return an element-wise result's fields; freeze labels combined with a fixed size."""
    ndim = len(shape)
    # Larger tensors first, so that a result is named by the weight and not by its gain or mask.
    order = sorted(operands, key=lambda x: (-x.numel(), _is_buffer(tracer, x)))
    lifted = [(x, [lb.lift(f, ndim) for f in tracer.fields(x)]) for x in order]
    merged: list[Tensor] = []
    for _, fields in lifted:
        for field in fields:
            merged = merge(tracer, merged, field)
    dropped = set()
    for tensor, fields in lifted:
        sizes = (1,) * (ndim - tensor.ndim) + tuple(tensor.shape)
        for field in merged:
            # An operand that shares one of the axes has tied the units along the others.
            shared = any(lb.varies(other, lb.axes(field)) for other in fields)
            if shared or id(field) in dropped or all(sizes[dim] == 1 for dim in lb.axes(field)):
                continue
            if tracer.drop_constant(field):
                dropped.add(id(field))
            else:
                tracer.freeze([field], "they are combined with a tensor of fixed size")
    return tuple(f for f in merged if id(f) not in dropped)


def _is_buffer(tracer: LabelTracer, tensor: Tensor) -> bool:
    info = tracer.parameter_infos.get(id(tensor))
    return info is not None and not info.trainable


def merge(tracer: LabelTracer, merged: list[Tensor], field: Tensor) -> list[Tensor]:
    """Add a field to others of the same tensor; relate it to those along the same axis."""
    apart = []
    for other in merged:
        if lb.varies(other, lb.axes(field)):
            tracer.relate(other, field)
            field = tracer.prefer(*torch.broadcast_tensors(other, field))
        else:
            apart.append(other)
    return [*apart, field]


def keep_labels(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Give the result the first argument's labels (dropout, in-place fills)."""
    results = out if isinstance(out, list | tuple) else [out]
    for result in results:
        if isinstance(result, Tensor) and result.ndim == args[0].ndim:
            tracer.set(result, tracer.fields(args[0]))
            if name.removesuffix("_") in _KEEPS_ZERO:
                tracer.note_passed(args[0], result)


RULES: dict[str, Rule] = {
    **{
        name: keep_labels
        for name in (
            "native_dropout",
            "bernoulli",
            "fill",
            "zero",
            "uniform",
            "normal_",
            "hardswish",
            "rand_like",
            "randn_like",
            "zeros_like",
            "ones_like",
            "full_like",
            "empty_like",
            "rrelu_with_noise",
            "alpha_dropout",
            "feature_dropout",
            "celu",
            "elu",
            "selu",
            "hardtanh",
            "threshold",
            "mish",
            "log_sigmoid_forward",
            "softplus",
            "random",
            "randint_like",
            "exponential",
            "cauchy",
            "log_normal",
            "geometric",
            "poisson",
            "nan_to_num",
        )
    },
    **{
        name: combine
        for name in ("copy", "normal", "_prelu_kernel", "masked_fill", "lerp", "floor_divide")
    },
}
