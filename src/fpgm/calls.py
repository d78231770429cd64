"""Which public torch function the user's code is in, for the one question operators cannot answer.

`x.flatten(1)` and `x.view(-1, 9216)` end in the same operator, but only the second fixes a size.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Calls(TorchFunctionMode):
    """Knows which public torch function the user's code is in, which operators no longer tell."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.stack.append(getattr(func, "__name__", ""))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.stack.pop()

    @property
    def derives_sizes(self) -> bool:
        """Whether the running function takes its sizes from its input, so nothing is fixed."""
        return bool(self.stack) and not _SAFE.isdisjoint(self.stack)


_SAFE = {"flatten", "chunk", "expand_as", "view_as", "reshape_as", "adaptive_avg_pool2d", "linear",
         "adaptive_avg_pool1d", "adaptive_max_pool2d", "layer_norm", "group_norm", "batch_norm",
         "instance_norm", "interpolate", "zeros_like", "ones_like", "full_like", "matmul",
         "__matmul__", "max_pool1d", "avg_pool1d", "dropout",
         "weight_norm", "conv1d", "conv2d", "conv3d", "pixel_shuffle", "pixel_unshuffle",
         "softmax", "prelu", "glu", "einsum", "_weight_norm"}  # fmt: skip
