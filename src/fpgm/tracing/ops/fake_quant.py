"""Fake quantization, as `torch.ao.quantization.prepare_qat` inserts it.

With a fixed scale it is element-wise. An active observer takes the range over all
channels on every call, so removing some would change the scale of the others: those channels are
frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.ao.quantization import ObserverBase

from fpgm.tracing import labels as lb
from fpgm.tracing.ops import reduction as reduce
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.norm import label_parameter

_OBSERVED = (
    "an observer takes their range (call model.apply(torch.ao.quantization.disable_observer) first)"
)


def _per_tensor(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    _pass_labels(tracer, args[0], out)


def _per_channel(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    x, scale, zero, axis = args[:4]
    _label_rows(tracer, x, axis, [scale, zero])
    _pass_labels(tracer, x, out)


def _fused_observer(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Handle observer and fake quantization in one; `args[1]` turns the observer on."""
    x, observes, axis = args[0], bool(args[1].any()), args[10]
    per_row = len(args) > 11 and bool(args[11])
    if per_row:
        _label_rows(tracer, x, axis, args[3:7])
    if observes:
        fields = tracer.fields(x)
        mixed = [f for f in fields if not per_row or lb.axes(f) != [axis % x.ndim]]
        tracer.freeze(mixed, _OBSERVED)
    _pass_labels(tracer, x, out)


def _range(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Handle minimum and maximum, for an observer or for user code."""
    if isinstance(tracer.model.get_submodule(tracer.module), ObserverBase):
        tracer.freeze(tracer.fields(args[0]), _OBSERVED)
    reduce.RULES[name](tracer, name, args, kwargs, out)


def _pass_labels(tracer: LabelTracer, x: Tensor, out: Any) -> None:
    if tracer.is_constant(x):  # though the operator also reads flags computed from constants
        tracer.note_constant([x], out)
    for result in out if isinstance(out, tuple | list) else (out,):
        tracer.set(result, tracer.fields(x))


def _label_rows(tracer: LabelTracer, x: Tensor, axis: int, rows: Sequence[Tensor]) -> None:
    """Label tensors that hold one number per channel."""
    axis %= x.ndim
    row = next((f.reshape(-1) for f in tracer.fields(x) if lb.axes(f) == [axis]), None)
    for tensor in rows:
        if tensor.numel() == x.shape[axis]:
            label_parameter(tracer, tensor, row, "scale")


RULES: dict[str, Rule] = {
    **{
        name: _per_tensor
        for name in ("fake_quantize_per_tensor_affine_cachemask",
                     "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
                     "_fake_quantize_learnable_per_tensor_affine")
    },
    **{
        name: _per_channel
        for name in ("fake_quantize_per_channel_affine_cachemask",
                     "_fake_quantize_learnable_per_channel_affine")
    },
    "_fused_moving_avg_obs_fq_helper": _fused_observer,
    "aminmax": _range,
}  # fmt: skip
