"""Inputs on which an exported file is compared with PyTorch: noise, and real ones if given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fpgm.errors import RequestError
from fpgm.utils.calibration_data import move_batches, read_inputs
from fpgm.utils.example_inputs import Example, batch_size, resize_batch, take_rows

_BATCHES = (1, 2, 5)
"""Batch sizes to check a file with, if it takes any."""


def noise_inputs(example: Example, *, any_batch: bool) -> Iterator[Example]:
    """Yield the example with its floating-point tensors replaced by noise.

    It comes in several batch sizes if `any_batch` and if all tensors have a batch dimension.
    Integers (tokens, positions) and scalars (a temperature) are kept: the model might not accept
    noise.

    >>> example = Example((torch.zeros(4, 3), torch.arange(4)), {})
    >>> [[tuple(t.shape) for t in x.args] for x in noise_inputs(example, any_batch=True)]
    [[(1, 3), (1,)], [(2, 3), (2,)], [(5, 3), (5,)]]
    """
    leaves = tree_leaves((example.args, dict(example.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    size = batch_size(example)
    if any_batch and size is not None and all(t.ndim and t.shape[0] == size for t in tensors):
        sized = [resize_batch(example, batch) for batch in _BATCHES]
    else:
        sized = [example] if any(_can_be_noise(t) for t in tensors) else []
    random = torch.Generator().manual_seed(0)

    def fill(value: Any) -> Any:
        if not _can_be_noise(value):
            return value
        return torch.randn(value.shape, generator=random).to(value)

    for batch in sized:
        args, kwargs = tree_map(fill, (batch.args, dict(batch.kwargs)))
        yield Example(args, kwargs)


def real_inputs(
    model: nn.Module, loader: Iterable[Any] | None, images: int
) -> tuple[list[Example], int]:
    """Read inputs from a loader; return batches, and the count of inputs."""
    if loader is None:
        return [], 0
    if not isinstance(images, int) or images < 1:
        raise RequestError(f"images is {images!r}: give an integer of at least 1.")
    read = read_inputs(move_batches(model, loader), images)
    try:
        examples = [read[number] for number in range(len(read))]
    finally:
        read.close()
    return examples, read.count


def split_batch(example: Example, batch: int) -> Iterator[Example]:
    """Split a batch into parts of one size; the last is padded by repeating its inputs.

    >>> [part.args[0].tolist() for part in split_batch(Example((torch.arange(5),), {}), 3)]
    [[0, 1, 2], [3, 4, 3]]
    """
    size = batch_size(example) or 1
    for start in range(0, size, batch):
        yield resize_batch(take_rows(example, range(start, min(start + batch, size))), batch)


def _can_be_noise(value: Any) -> bool:
    """Tell whether a value may be replaced by noise."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
