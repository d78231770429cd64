"""Windows of an image as channels or as a separate axis, and back (`unfold`, `fold`)."""

from __future__ import annotations

import math

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.slice_concat import strided_index


def _im2col(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Label […, C, H, W] → […, C · window, positions]: each channel becomes a block."""
    x, window = args[0], math.prod(args[1])
    channel = x.ndim - 3
    fields = []
    for f in tracer.fields(x):
        if lb.varies(f, (x.ndim - 2, x.ndim - 1)):
            tracer.freeze([f], f"'{name}' runs along the channels")
        else:
            f = f.squeeze(-1)
            fields.append(f.repeat_interleave(window, channel) if f.shape[channel] > 1 else f)
    tracer.set(out, fields)


def _col2im(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Label […, C · window, positions] → […, C, H, W]: tie the values in one window."""
    x, window = args[0], math.prod(args[2])
    channel = x.ndim - 2
    fields = []
    for f in tracer.fields(x):
        if f.shape[-1] > 1:
            tracer.freeze([f], f"'{name}' runs along the channels")
            continue
        if f.shape[channel] > 1:
            rows = f.movedim(channel, 0).reshape(f.shape[channel] // window, window, -1)
            tracer.tie(rows, [1])
            f = f[strided_index(channel, window)]
        fields.append(f.unsqueeze(-1))
    tracer.set(out, fields)


def _unfold(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Label windows along one dim, as a last axis."""
    x = args[0]
    dim = args[1] % max(1, x.ndim)
    fields = []
    for f in tracer.fields(x):
        if f.shape[dim] > 1:
            tracer.freeze([f], f"'{name}' runs along the channels")
        else:
            fields.append(f.unsqueeze(-1))
    tracer.set(out, fields)


RULES: dict[str, Rule] = {"im2col": _im2col, "col2im": _col2im, "unfold": _unfold}
