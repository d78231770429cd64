"""What a file is tried on before it is left there: noise, and real inputs if there are any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fpgm.errors import RequestError
from fpgm.utils.calibration_data import moved, read_inputs
from fpgm.utils.example_inputs import Example, batch_of, resized, taken

_BATCHES = (1, 2, 5)
"""Sizes a file of any batch size is tried with."""


def noise(example: Example, *, any_batch: bool) -> Iterator[Example]:
    """The example with noise in place of its floating-point numbers.

    In several batch sizes, if the size may vary and every tensor has it; else as large as the
    example is. Whole numbers (tokens, positions) and single ones (a temperature) stay: noise might
    be nothing the model takes.

    >>> example = Example((torch.zeros(4, 3), torch.arange(4)), {})
    >>> [[tuple(t.shape) for t in own.args] for own in noise(example, any_batch=True)]
    [[(1, 3), (1,)], [(2, 3), (2,)], [(5, 3), (5,)]]
    """
    leaves = tree_leaves((example.args, dict(example.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    size = batch_of(example)
    if any_batch and size is not None and all(t.ndim and t.shape[0] == size for t in tensors):
        sized = [resized(example, batch) for batch in _BATCHES]
    else:
        sized = [example] if any(_noisy(t) for t in tensors) else []
    random = torch.Generator().manual_seed(0)

    def drawn(value: Any) -> Any:
        return torch.randn(value.shape, generator=random).to(value) if _noisy(value) else value

    for own in sized:
        args, kwargs = tree_map(drawn, (own.args, dict(own.kwargs)))
        yield Example(args, kwargs)


def real(
    model: nn.Module, loader: Iterable[Any] | None, images: int, batch: int | None
) -> tuple[list[Example], int]:
    """Inputs of a loader, in batches as they come or of the one size there is, and their number."""
    if loader is None:
        return [], 0
    if not isinstance(images, int) or images < 1:
        raise RequestError(f"images is {images!r}: give a whole number from 1 up.")
    read = read_inputs(moved(model, loader), images)
    try:
        found = [read[number] for number in range(len(read))]
    finally:
        read.close()
    if batch is not None:
        found = [piece for own in found for piece in pieces(own, batch)]
    return found, read.count


def pieces(example: Example, batch: int) -> Iterator[Example]:
    """A batch in pieces of one size; the last is filled up by repeating what it has.

    >>> [piece.args[0].tolist() for piece in pieces(Example((torch.arange(5),), {}), 3)]
    [[0, 1, 2], [3, 4, 3]]
    """
    size = batch_of(example) or 1
    for start in range(0, size, batch):
        yield resized(taken(example, range(start, min(start + batch, size))), batch)


def _noisy(value: Any) -> bool:
    """Whether noise may stand for a value."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
