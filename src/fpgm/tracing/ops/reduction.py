"""Reductions and other operators that combine values along an axis.

Along space, channels pass through. Along a labeled axis, all positions are combined: if the labels
also change along another axis (a sum over branches), the branches' units are removed together; if
not (a mean over channels), the units are mixed and therefore frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule


def mix(
    tracer: LabelTracer, field: Tensor, dims: Sequence[int], name: str, soft: bool = False
) -> Tensor:
    """Return the labels after an operator that combines all positions along `dims`."""
    looked = [d for d in dims if field.shape[d] > 1]
    if not looked:
        return field
    if len(looked) == len(lb.axes(field)):
        tracer.freeze([field], f"'{name}' over channels mixes them", soft)
    else:
        tracer.tie(field, looked)
    for d in looked:
        field = field.narrow(d, 0, 1)
    return field


def _dims(value: Any, ndim: int) -> list[int]:
    if value is None or value == []:
        return list(range(ndim))
    return [d % ndim for d in (value if isinstance(value, list | tuple) else [value])]


def reduce(position: int, default: int | None = None) -> Any:
    """Return a rule for reductions whose dims are the argument at a position."""

    def rule(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
        x = args[0]
        given = args[position] if len(args) > position else kwargs.get("dim", default)
        dims = _dims(given if not isinstance(given, bool) else None, x.ndim)
        fields = [mix(tracer, f, dims, name) for f in tracer.fields(x)]
        if tracer.is_constant(x):  # weights that were stacked, and are now combined
            for mixed, f in zip(fields, tracer.fields(x), strict=True):
                tracer.note_sum_term(mixed, f, [x])
        fields = [f for f in fields if f.numel() > 1]  # a mean of all channels is not a channel
        for result in out if isinstance(out, tuple | list) else (out,):
            if result.ndim != x.ndim:
                kept = [d for d in range(x.ndim) if d not in dims]
                moved = [
                    f.permute(*kept, *dims).flatten(len(kept)).select(-1, 0)
                    if kept
                    else f.reshape(-1)
                    for f in fields
                ]
                tracer.set(result, [f for f in moved if f.ndim == result.ndim])
            else:
                tracer.set(result, fields)

    return rule


def along(position: int) -> Any:
    """Return a rule for operators that mix all values along an axis (softmax, sort, topk).

    The axis may become shorter, the others never.
    """

    def rule(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
        x = args[0]
        dims = _dims(args[position] if len(args) > position else kwargs.get("dim", -1), x.ndim)
        fields = tracer.fields(x)
        mixed = [m for f in fields if (m := mix(tracer, f, dims, name)).numel() > 1]
        for result in out if isinstance(out, tuple | list) else (out,):
            tracer.set(result, fields if result.shape == x.shape else mixed)

    return rule


RULES: dict[str, Rule] = {
    **{
        name: reduce(1)
        for name in ("sum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "max",
                     "min", "prod", "argmax", "argmin", "logsumexp", "any", "all", "nansum",
                     "median", "nanmedian", "aminmax", "count_nonzero")
    },
    **{name: reduce(2) for name in ("norm", "linalg_vector_norm")},
    **{
        name: along(1)
        for name in ("_softmax", "_safe_softmax", "_log_softmax", "softmax", "log_softmax",
                     "cumsum", "cumprod")
    },
}  # fmt: skip
