"""Track which public torch function the user's code is calling; operators alone do not show it.

`x.flatten(1)` and `x.view(-1, 9216)` end in the same operator, but only the second fixes a size.
`x.numpy()` is not an operator, but what the code does with the values depends on every channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class CallContext(TorchFunctionMode):
    """Tracks which public torch function the user's code is calling."""

    def __init__(
        self,
        on_values_leave: Callable[[Tensor, str], None],
        replacements: Mapping[Any, Callable[..., Any]],
    ) -> None:
        super().__init__()
        self.stack: list[str] = []
        self._args: tuple[Any, ...] = ()
        """Arguments of the function that was called last."""
        self._on_values_leave = on_values_leave
        """Called with every tensor whose values leave torch, and the method."""
        self._replacements = replacements
        """Called instead of functions that cannot be recognized by their operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _VALUE_READERS and args and isinstance(args[0], Tensor):
            self._on_values_leave(args[0], name)
        self.stack.append(name)
        self._args = args
        try:
            return self._replacements.get(func, func)(*args, **(kwargs or {}))
        finally:
            self.stack.pop()

    @property
    def derives_sizes(self) -> bool:
        """Tell whether the running function takes its sizes from its input, so nothing is fixed."""
        return bool(self.stack) and not _DERIVE_SIZES.isdisjoint(self.stack)

    def infers_size_along(self, dim: int) -> bool:
        """Tell whether the running function is a view whose size along a dim is -1."""
        if not self.stack or self.stack[-1] not in _VIEWS:
            return False
        sizes: Any = self._args[1:]
        sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
        return dim < len(sizes) and type(sizes[dim]) is int and sizes[dim] == -1


_VIEWS = frozenset(("view", "reshape"))

_VALUE_READERS = frozenset((
    "numpy", "__array__", "tolist", "item", "__float__", "__int__", "__bool__", "__complex__",
    "__index__", "__dlpack__", "data_ptr", "storage", "untyped_storage", "__deepcopy__",
))  # fmt: skip

_DERIVE_SIZES = {"flatten", "chunk", "adaptive_avg_pool2d", "linear", "adaptive_avg_pool1d",
         "adaptive_max_pool2d", "layer_norm", "group_norm", "batch_norm",
         "instance_norm", "interpolate", "zeros_like", "ones_like", "full_like", "matmul",
         "__matmul__", "max_pool1d", "avg_pool1d", "dropout",
         "weight_norm", "conv1d", "conv2d", "conv3d", "pixel_shuffle", "pixel_unshuffle",
         "softmax", "prelu", "glu", "einsum", "_weight_norm"}  # fmt: skip
