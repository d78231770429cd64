"""Example inputs in a uniform format.

A tensor, a tuple of arguments or a dict of keyword arguments is one example; a list holds several.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from fpgm.errors import RequestError
from fpgm.utils.default_device import users_default_device
from fpgm.utils.modules import check_module
from fpgm.utils.outputs import find_tensors
from fpgm.utils.preserve_state import is_plain_object
from fpgm.utils.text import format_shape


@dataclass(frozen=True)
class Example:
    """Arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def call(self, model: nn.Module) -> Any:
        """Call the model with copies of them: some models write into their input."""
        args, kwargs = tree_map(_copy, (self.args, dict(self.kwargs)))
        with users_default_device():
            return model(*args, **kwargs)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, nn.Module) or not is_plain_object(value):
        return value
    try:
        with _disable_current_modes():  # which deepcopy does not support
            return copy.deepcopy(value)  # a batch of the user's own class: graphs, boxes
    except Exception:  # its own code may raise anything
        return value


def to_model_device(model: nn.Module, inputs: Any) -> Any:
    """Move example inputs in any of their forms to the model's device."""
    check_module(model)
    device = next((p.device for p in model.parameters()), None)
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, inputs)


def as_examples(inputs: Any) -> list[Example]:
    """Read `example_inputs` in any of its forms.

    >>> import torch
    >>> [example.kwargs for example in as_examples({"x": 1})]
    [{'x': 1}]
    >>> len(as_examples([torch.zeros(1), (torch.zeros(1), torch.zeros(1))]))
    2
    """
    if isinstance(inputs, list | tuple) and len(inputs) > 1 and all(type(n) is int for n in inputs):
        sizes = ", ".join(map(str, inputs))
        raise RequestError(f"example_inputs is a shape: give a tensor, torch.randn({sizes}).")
    if isinstance(inputs, list):
        if not inputs:
            raise RequestError("example_inputs is an empty list: give at least one example.")
        return [example for item in inputs for example in as_examples(item)]
    if isinstance(inputs, Tensor):
        return [_check_not_empty(Example((inputs,), {}))]
    if isinstance(inputs, tuple):
        return [_check_not_empty(Example(inputs, {}))]
    if isinstance(inputs, Mapping):
        return [_check_not_empty(Example((), dict(inputs)))]
    raise RequestError(
        f"example_inputs is a {type(inputs).__name__}: give a tensor, a tuple of arguments, "
        "a dict of keyword arguments, or a list of these."
    )


def _check_not_empty(example: Example) -> Example:
    """Refuse an example with empty tensors: torch skips operators on them."""
    tensors = tensors_in((example.args, dict(example.kwargs)))
    if tensors and not any(tensor.numel() for tensor in tensors):
        raise RequestError(
            f"The example input is empty ({describe_example(example)}): give one that is not empty."
        )
    return example


def describe_example(example: Example) -> str:
    """Describe the shapes and dtypes of an example's tensors.

    >>> describe_example(Example((Tensor(2, 3),), {"mask": Tensor(2).bool()}))
    '2×3 float32, 2 bool'
    """
    tensors = tensors_in((example.args, dict(example.kwargs)))
    return ", ".join(
        f"{format_shape(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors
    )


def resize_batch(example: Example, batch: int) -> Example:
    """Change the batch size of an example, repeating inputs as needed."""
    if not isinstance(batch, int) or not 0 < batch <= _MAX_BATCH:
        raise RequestError(f"batches has {batch!r}: give integers from 1 to {_MAX_BATCH:,}.")
    size = batch_size(example)
    return example if not size else take_rows(example, [n % size for n in range(batch)])


_MAX_BATCH = 2**16
"""Inputs of one batch: more would only be a mistake, and fill the memory."""


def take_rows(example: Example, rows: Sequence[int]) -> Example:
    """Select inputs of a batch by index, in every tensor that has one row per input.

    >>> take_rows(Example((Tensor([1, 2, 3]), Tensor([0])), {}), [2, 0]).args
    (tensor([3., 1.]), tensor([0.]))
    """
    size = batch_size(example)

    def select(value: Any) -> Any:
        counts = isinstance(value, Tensor) and value.ndim and value.shape[0] == size
        return value[list(rows)] if counts else value

    args, kwargs = tree_map(select, (example.args, dict(example.kwargs)))
    return Example(args, kwargs)


def batch_size(example: Example) -> int | None:
    """Return the batch size of an example: the first size of its first tensor."""
    values = (*example.args, *example.kwargs.values())
    return next((int(v.shape[0]) for v in values if isinstance(v, Tensor) and v.ndim), None)


def bind_positional(model: nn.Module, example: Example) -> Example:
    """Turn keyword arguments into positional ones where the signature allows it."""
    try:
        bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    except (TypeError, ValueError):
        return example
    return Example(bound.args, bound.kwargs)


def float_outputs(model: nn.Module, example: Example) -> list[Tensor]:
    """Return every floating-point tensor that a model returns for an example."""
    return [t for t in tensors_in(example.call(model)) if t.is_floating_point()]


def map_tensors(example: Example, change: Callable[[Tensor], Tensor]) -> Example:
    """Change every tensor of an example, and nothing else."""

    def change_value(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    return Example(
        tree_map(change_value, example.args), tree_map(change_value, dict(example.kwargs))
    )


def shuffled_inputs(examples: Sequence[Example], count: int) -> list[Example]:
    """Shuffle the examples' values to get more inputs that stay in the model's domain."""
    generator = torch.Generator().manual_seed(0)

    def shuffle(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not t.numel() or t.layout != torch.strided:
            return t
        values = t.flatten()
        if bool((values == values[0]).all()):  # all equal: shuffling would change nothing
            return t + torch.rand(t.shape, generator=generator).to(t)
        return values[torch.randperm(t.numel(), generator=generator).to(t.device)].reshape(t.shape)

    return [map_tensors(examples[i % len(examples)], shuffle) for i in range(max(0, count))]


def tensors_in(value: Any) -> list[Tensor]:
    """List every tensor in a nested value: containers, dataclasses, objects."""
    return find_tensors(value)


def squared_error(output: Tensor, target: Tensor) -> float:
    """Compute the squared error of an output where the target is finite."""
    finite = target.isfinite()
    return float((output - target)[finite].double().square().sum())
