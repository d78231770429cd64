"""Keep the weights of a model whose forward pass writes into them (`self.weight.data.mul_(0.9)`).

Copying all weights before every pass would cost as much as the model. Only those that an operator
is about to change are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class KeptWeights(TorchDispatchMode):
    """Copies parameters that operators write into, just before they do."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not hasattr(torch.compiler, "set_stance")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights: dict[int, list[Tensor]] = {}
        """The parameters in each piece of memory."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """The data of parameters that were written, and copies, by the parameter's id."""
        for parameter in model.parameters():
            memory = _memory(parameter)
            if memory:
                self._weights.setdefault(memory, []).append(parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.note(func, args, kwargs)
        return func(*args, **kwargs)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy what an operator is about to write into."""
        if not isinstance(func, HigherOrderOperator) and func._schema.is_mutable:
            for tensor in _written_tensors(func, args, kwargs):
                self._keep(tensor)

    def _keep(self, tensor: Tensor) -> None:
        parameters = self._weights.get(_memory(tensor))
        if parameters is None:
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter in parameters:
                if id(parameter) not in self._before:
                    data = parameter.detach()
                    self._before[id(parameter)] = data, data.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back."""
        for data, before in self._before.values():
            data.copy_(before)
        self._before.clear()


def _written_tensors(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """List the arguments that an operator writes into, by position and name.

    >>> _written_arguments(torch.ops.aten.mul_.Tensor)
    ((0, 'self'),)
    """
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _memory(tensor: Tensor) -> int:
    """Return where a tensor's memory starts; 0 if it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or a wrapper of another tensor
        return 0
