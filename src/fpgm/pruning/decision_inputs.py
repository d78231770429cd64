"""Record the numbers from which a model computes integers: inputs of argmax, sort, comparisons.

A class index says little about the logits behind it: they may be wrong and still give the same
class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fpgm.pruning.output_differences import as_tensor
from fpgm.utils.modules import modules_by_path
from fpgm.utils.outputs import Leaf

_SKIPPED = ("max_pool", "dropout", "isnan", "isinf", "isfinite")
"""Operators whose integers or booleans only accompany the numbers that are passed on."""

_STEPS = ("round", "floor", "ceil", "trunc", "sign")
"""Operators that return integers in a floating-point dtype."""


class DecisionRecorder(TorchDispatchMode):
    """Records the floating point inputs of every operator that returns integers or booleans.

    Also records which tensors any operator reads, by their ids.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.leaves: list[Leaf] = []
        self.read: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in (*args, *(kwargs or {}).values()):
            self.read.update(map(id, value) if isinstance(value, list | tuple) else (id(value),))
        if isinstance(func, HigherOrderOperator):
            return out
        results = out if isinstance(out, tuple | list) else (out,)
        name = func._schema.name.rpartition("::")[2]
        discrete = any(isinstance(r, Tensor) and _is_discrete(r.dtype) for r in results)
        if discrete or name in _STEPS:
            self._record(name, func, args)
        return out

    def _record(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        if not func._schema.is_mutable and not any(word in name for word in _SKIPPED):
            self.leaves += [
                Leaf(f"what '{name}' reads", value.clone())
                for value in args
                if isinstance(value, Tensor) and value.is_floating_point()
            ]


def returns_integers(outputs: list[Leaf]) -> bool:
    """Tell whether some output holds integers or booleans, which hide small differences."""
    values = [as_tensor(leaf.value) for leaf in outputs]
    return any(isinstance(leaf.value, int) for leaf in outputs) or any(
        _is_discrete(value.dtype) for value in values if value is not None
    )


def comparable(want: list[Leaf], have: list[Leaf]) -> list[tuple[Leaf, Leaf]]:
    """Pair the recorded inputs of two models where their shapes agree."""
    if [leaf.path for leaf in want] != [leaf.path for leaf in have]:
        return []  # a loop that ran a different number of times
    pairs = zip(want, have, strict=True)
    return [(a, c) for a, c in pairs if a.value.shape == c.value.shape]


def unused_modules(model: nn.Module, read: set[int]) -> list[str]:
    """List modules whose parameters no operator has read."""
    return [
        path
        for path, module in modules_by_path(model).items()
        if path
        and not isinstance(module, torch.jit.ScriptModule)
        and (parameters := [p for p in module._parameters.values() if p is not None])
        and not any(id(p) in read for p in parameters)
    ]


def _is_discrete(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex
