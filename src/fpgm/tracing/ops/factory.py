"""Operators without tensor inputs: constants, whose axes may be channels, and non-data results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule


def _factory(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Label a tensor of one constant: any of its axes may be a channel axis."""
    if out.numel() > 1 and out.ndim > 1:
        tracer.set(
            out,
            [
                lb.along(tracer.constant_labels(size), out.ndim, dim)
                for dim, size in enumerate(out.shape)
                if size > 1
            ],
        )


def _to_number(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Freeze the inputs of a plain number or boolean, which labels cannot follow."""
    for tensor in args:
        if isinstance(tensor, Tensor):
            tracer.on_values_leave(tensor, name)


def _no_labels(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Do nothing: sizes, random numbers and index arithmetic carry no labels."""


_CONSTANT = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")

_NO_DATA = (
    "arange", "linspace", "scalar_tensor", "rand", "randn", "randint", "randperm", "eye",
    "is_same_size", "sym_size", "tril_indices", "triu_indices", "empty_strided", "_assert_async",
    "_assert_tensor_metadata",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **{name: _factory for name in _CONSTANT},
    **{name: _no_labels for name in _NO_DATA},
    **{name: _to_number for name in ("_local_scalar_dense", "equal")},
}

FIXED_SIZE_OPS = set(_CONSTANT)
