"""Operators along space: pooling, resizing, padding by content. Channels pass through."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule

_SPATIAL = {
    1: ("adaptive_max_pool1d", "adaptive_avg_pool1d", "avg_pool1d", "upsample_linear1d",
        "upsample_nearest1d", "_upsample_nearest_exact1d", "reflection_pad1d", "replication_pad1d"),
    2: ("_adaptive_avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d",
        "max_pool2d_with_indices", "max_pool2d", "fractional_max_pool2d", "upsample_nearest2d",
        "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d",
        "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "reflection_pad2d",
        "replication_pad2d", "grid_sampler_2d", "max_unpool2d", "tril", "triu"),
    3: ("_adaptive_avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d",
        "max_pool3d_with_indices", "upsample_nearest3d", "_upsample_nearest_exact3d",
        "upsample_trilinear3d", "reflection_pad3d", "replication_pad3d", "grid_sampler_3d",
        "max_unpool3d", "fractional_max_pool3d"),
}  # fmt: skip


def _spatial_rule(count: int) -> Any:
    def rule(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
        x = args[0]
        space = range(x.ndim - count, x.ndim)
        _second_input(tracer, name, x, args[1] if len(args) > 1 else None)
        good = []
        for field in tracer.fields(x):
            if lb.varies(field, space):
                tracer.freeze([field], f"'{name}' runs along the channels")
            else:
                good.append(field)
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, Tensor):
                tracer.set(result, good)
                tracer.note_passed(x, result)

    return rule


def _second_input(tracer: LabelTracer, name: str, x: Tensor, other: Any) -> None:
    """Relate the indices of an unpooling to its channels; freeze labels of other inputs."""
    if not isinstance(other, Tensor):
        return
    for f in tracer.fields(other):
        partners = [g for g in tracer.fields(x) if lb.axes(g) == lb.axes(f)]
        if name.startswith("max_unpool") and partners:
            tracer.relate(partners[0], f)
        else:
            tracer.freeze([f], f"'{name}' reads them")


def _rotate(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, dims = args[0], args[2] if len(args) > 2 else (0, 1)
    turned = [f for f in tracer.fields(x) if lb.varies(f, [d % x.ndim for d in dims])]
    tracer.freeze(turned, f"'{name}' runs along the channels")
    tracer.set(out, [f for f in tracer.fields(x) if all(f is not t for t in turned)])


def _diagonal(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = args[0]
    given = args[2:4] if len(args) > 3 else (kwargs.get("dim1", 0), kwargs.get("dim2", 1))
    first, second = (d % x.ndim for d in given)
    crossed = [f for f in tracer.fields(x) if lb.varies(f, (first, second))]
    tracer.freeze(crossed, f"'{name}' runs along the channels")
    rest = [f for f in tracer.fields(x) if all(f is not c for c in crossed)]
    tracer.set(out, [f.diagonal(0, first, second) for f in rest])


RULES: dict[str, Rule] = {
    **{name: _spatial_rule(count) for count, names in _SPATIAL.items() for name in names},
    "rot90": _rotate,
    "diagonal": _diagonal,
}
