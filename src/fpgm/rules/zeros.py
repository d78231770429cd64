"""Where a silenced unit is exactly zero: behind its filter, as long as zero stays zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fpgm.tracer import Tracer

_WRITES = {"convolution": 1, "addmm": -1, "mm": -1}
"""Their output is zero where the filter and the bias are; the axis they read of an activation."""

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
"""Zero in the first input is zero in the output (a norm's shift and mean are silenced too)."""


def after(tracer: Tracer, name: str, inputs: Sequence[Tensor]) -> bool:
    """Whether the operator's result is zero for a silenced unit."""
    plain = name.removesuffix("_")
    data = [x for x in inputs if not tracer.is_constant(x)]
    if plain in _WRITES:
        # Channels along another axis are not read but handed on, with a bias or neighbours added.
        return all(f.shape[_WRITES[plain]] > 1 for x in data for f in tracer.fields(x))
    if plain in _KEEPS:
        return bool(data) and tracer.is_zero(data[0])
    if plain in ("mul", "div"):
        return any(tracer.is_zero(x) for x in data[: 1 if plain == "div" else None])
    return plain in ("add", "sub") and len(data) == len(inputs) and all(map(tracer.is_zero, data))
