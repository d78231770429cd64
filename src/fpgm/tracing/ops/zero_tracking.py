"""Track where a masked unit is exactly zero: after its filter, while operators keep it zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import LabelTracer

_PRODUCTS = {"addmm", "mm"}
"""Their output is zero where the filter and the bias are, and so is a convolution's."""

_KEEPS = {
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm", "native_group_norm", "relu", "gelu", "silu", "leaky_relu", "tanh",
    "hardswish", "elu", "celu", "selu", "mish", "_prelu_kernel", "native_dropout", "neg", "abs",
    "clone", "alias", "detach", "_to_copy", "view", "_unsafe_view", "reshape", "permute",
    "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "mean", "sum", "amax",
    "avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "adaptive_max_pool2d",
    "upsample_nearest2d", "upsample_bilinear2d", "avg_pool3d", "max_pool3d_with_indices",
    "_adaptive_avg_pool3d", "hardtanh", "flip", "rrelu_with_noise",
}  # fmt: skip
"""Zero in the first input is zero in the output (a norm's shift and mean are masked too)."""


_PIECES = {"split", "split_with_sizes", "chunk", "unbind", "_weight_norm_interface"}
_KEEPS_WEIGHTS = {
    "sign", "round", "floor", "trunc", "sin", "tan", "asin", "atan", "sinh", "erf", "sqrt",
    "square", "_weight_norm", "_weight_norm_interface", "triu", "tril", "select", "narrow",
    "flip", "roll", "repeat", "as_strided", "contiguous", "squeeze", "index_select", "prod",
    "amin", "linalg_vector_norm", "norm", "upsample_bicubic2d", "rot90", "movedim", "diagonal",
    "fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "lift_fresh", "unfold", "ceil",
    "_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine",
}  # fmt: skip
"""Further operators that make zero of zero, in weights."""


def zero_after(tracer: LabelTracer, name: str, inputs: Sequence[Tensor], out: Tensor) -> bool:
    """Tell whether the operator's result is zero for a masked unit."""
    plain = name.removesuffix("_")
    data = [x for x in inputs if not tracer.is_constant(x)]
    # Channels along an axis that is not read are passed on, with a bias or neighbors added.
    if plain == "convolution":
        return all(_reads_all(tracer, x, 1) for x in data)
    if plain in _PRODUCTS:
        left, right = inputs[-2:]
        return _reads_all(tracer, left, -1) and _reads_all(tracer, right, -2)
    if plain in _KEEPS:
        return bool(data) and tracer.is_zero(data[0])
    if plain in ("mul", "div"):
        zero_inputs = [x for x in data[: 1 if plain == "div" else None] if tracer.is_zero(x)]
        return bool(zero_inputs) and all(
            any(_carries(tracer, x, f) for x in zero_inputs) for f in tracer.fields(out)
        )
    return (
        plain in ("add", "sub")
        and len(data) == len(inputs)
        and all(tracer.is_zero(x) for x in data)
        and all(_carries(tracer, x, f) for f in tracer.fields(out) for x in data)
    )


def keeps_zeros(
    tracer: LabelTracer, name: str, args: Sequence[Any], inputs: Sequence[Tensor], out: Any
) -> bool:
    """Tell whether a computed weight is zero wherever the parameters of its units are."""
    plain = name.removesuffix("_")
    zero = [x for x in inputs if not tracer.is_lifted(x)]
    fields = tracer.fields(out) if isinstance(out, Tensor) else ()
    if not fields:  # no unit, or several results
        return plain in _PIECES and len(zero) == len(inputs)
    if plain in _KEEPS or plain in _KEEPS_WEIGHTS:
        return bool(inputs) and not tracer.is_lifted(inputs[0])
    if plain == "constant_pad_nd":
        return bool(zero) and (len(args) < 3 or args[2] == 0)
    if plain in ("mul", "div", "mm", "bmm", "convolution"):
        factors = inputs[:1] if plain == "div" else inputs[:2]
        zero = [x for x in factors if not tracer.is_lifted(x)]
        return all(any(_carries(tracer, x, f) for x in zero) for f in fields)
    if plain in ("add", "sub", "cat", "stack"):
        tensors = 2 if plain in ("add", "sub") else len(inputs)
        return len(zero) == len(inputs) == tensors and all(
            _carries(tracer, x, f) for f in fields for x in inputs
        )
    return False


def _reads_all(tracer: LabelTracer, x: Tensor, axis: int) -> bool:
    """Tell whether all channels of an activation lie along the axis that is read."""
    return tracer.is_constant(x) or all(f.shape[axis] > 1 for f in tracer.fields(x))


def _carries(tracer: LabelTracer, x: Tensor, field: Tensor) -> bool:
    """Tell whether the units of a field are this tensor's too, not only broadcast over it."""
    return any(lb.varies(lb.lift(f, field.ndim), lb.axes(field)) for f in tracer.fields(x))
