"""Normalization: exact per channel, not over channels.

BatchNorm treats every channel on its own. LayerNorm and GroupNorm take statistics over channels, so
removing some changes the rest. Removing whole norm groups is exact; anything else is frozen unless
`approximate=True`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.utils.parameter_roles import Role

_OVER = "statistics over channels would change"


def label_parameter(
    tracer: LabelTracer, tensor: Tensor | None, row: Tensor | None, role: Role
) -> None:
    """Give a 1-d parameter the labels of the channel axis it belongs to."""
    if tensor is None or tensor.ndim != 1:
        return
    info = tracer.unlabelled_parameter(tensor)
    if tensor.numel() < 2:
        if info is not None:
            info.name_axes([])
    elif row is None:
        tracer.freeze(tracer.fields(tensor), "it belongs to channels of fixed size")
    elif info is not None:
        info.name_axes([(row.reshape(-1), role)])
    elif not tracer.fields(tensor):
        tracer.freeze([row], "they are combined with a tensor of fixed size")
    else:
        for field in tracer.fields(tensor):
            tracer.relate(field, row.reshape(-1))
            if not tracer.has_role(tensor):
                tracer.note_role(field, role, tensor)


def channel_row(tracer: LabelTracer, x: Tensor, dim: int) -> Tensor | None:
    """Return the labels along one dim, tied over any other dim they change along."""
    rows = [f for f in tracer.fields(x) if f.shape[dim] > 1]
    if not rows:
        return None
    row = rows[0]
    for other in rows[1:]:
        tracer.freeze([other], "two kinds of channels share an axis")
    others = [d for d in lb.axes(row) if d != dim]
    tracer.tie(row, others)
    for d in others:
        row = row.narrow(d, 0, 1)
    return row.reshape(-1)


def _batch_norm(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    x, weight, bias = args[:3]
    mean, var = (args[3], args[4]) if isinstance(args[3], Tensor) else (None, None)
    uses_batch = mean is None or any(a is True for a in args[5:6])
    if uses_batch:
        for f in tracer.fields(x):
            others = [d for d in lb.axes(f) if d != 1]
            if others and f.shape[1] == 1:
                # A standardized weight: statistics over its inputs, which `approximate` may reduce.
                tracer.freeze([f], _OVER, soft=tracer.is_constant(x) and others == [2])
    row = channel_row(tracer, x, 1)
    for scale in (weight, var):
        label_parameter(tracer, scale, row, "scale")
    for shift in (bias, mean):
        label_parameter(tracer, shift, row, "shift")
    tracer.set(out[0], tracer.fields(x) if row is None else _with_row(tracer, x, row))


def _with_row(tracer: LabelTracer, x: Tensor, row: Tensor) -> list[Tensor]:
    rest = [f for f in tracer.fields(x) if f.shape[1] == 1]
    return [lb.along(row, x.ndim, 1), *rest]


def _layer_norm(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    x, shape = args[0], args[1]
    dims = range(x.ndim - len(shape), x.ndim)
    rows = []
    for f in tracer.fields(x):
        mixed = [d for d in dims if f.shape[d] > 1]
        if mixed:
            one_axis = len(shape) == 1 and lb.axes(f) == [x.ndim - 1]
            has_weight = len(args) > 2 and args[2] is not None
            tracer.freeze([f], _OVER, soft=one_axis and has_weight)
            # Channels that change along other dims too do not belong to single weights.
            rows += [f] if one_axis else []
    roles: tuple[Role, Role] = ("scale", "shift")
    for tensor, role in zip(args[2:4], roles, strict=False):
        if tensor is not None and len(shape) == 1:
            label_parameter(tracer, tensor, rows[0].reshape(-1) if rows else None, role)
        elif tensor is not None:
            tracer.freeze(tracer.fields(tensor), _OVER)
    tracer.set(out[0], tracer.fields(x))


def _group_norm(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    x, weight, bias, groups = args[0], args[1], args[2], args[6]
    row = channel_row(tracer, x, 1)
    label_parameter(tracer, weight, row, "scale")
    label_parameter(tracer, bias, row, "shift")
    if row is not None:
        blocks = row.reshape(groups, -1)
        if groups == 1:
            tracer.freeze([row], _OVER)
        elif blocks.shape[1] > 1:
            tracer.tie(blocks, [1])
        tracer.note_grouped_op(blocks)
        tracer.note_norm_group(blocks.shape[1])
        tracer.set(out[0], _with_row(tracer, x, row))
    else:
        tracer.set(out[0], tracer.fields(x))


def weight_norm(tracer: LabelTracer, v: Tensor, g: Tensor, dim: int, out: Tensor) -> None:
    """Label W = g · v / ‖v‖, with a norm of each slice along `dim` (-1: of the whole).

    Slices along another axis change the norm, which the gains make up for (`weight_norms`).
    """
    fields = tracer.fields(v)
    axis = None if dim == -1 else dim % v.ndim
    if not tracer.scales_gain(v, g):
        across = [f for f in fields if axis is None or f.shape[axis] == 1]
        tracer.freeze(across, "a weight norm that torch did not register would change")
    for f in tracer.fields(g):
        for field in fields:
            if axis is not None and field.shape[axis] > 1 and f.shape[axis] > 1:
                tracer.relate(field, f)
                tracer.note_sum_term(field, f, [v, g])
    tracer.set(out, fields)
    for tensor, is_gain in ((v, False), (g, True)):
        info = tracer.parameter_infos.get(id(tensor))
        if info is not None and is_gain:
            info.gain = True
        elif info is not None:
            info.norm_axis = axis


def _weight_norm(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Label the fused operator when it is called directly; others are handled earlier."""
    dim = args[2] if len(args) > 2 else 0
    weight_norm(tracer, args[0], args[1], dim, out[0] if isinstance(out, tuple) else out)


RULES: dict[str, Rule] = {
    **{
        name: _batch_norm
        for name in ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
                     "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
                     "miopen_batch_norm", "_batch_norm_no_update")
    },
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm": _weight_norm,
}  # fmt: skip
