"""Divide inputs into the first ones, to measure errors on, and the others, to solve with.

Errors on the inputs that a layer was solved with say nothing if the layer has more weights than
there are inputs: a classifier behind a global pooling then fits them exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fpgm.utils.calibration_data import Inputs
from fpgm.utils.example_inputs import Example, map_tensors, tensors_in


def first_inputs(inputs: Inputs, count: int) -> list[Example]:
    """Return this rank's of the first batches, which have `count` inputs.

    The last one is cut if its shapes allow it.
    """
    examples: list[Example] = []
    for number in range(len(inputs)):
        left = count - inputs.offset_of(number)
        if left <= 0:
            break
        example = inputs[number]
        examples.append(_cut(example, slice(left)) if _can_be_cut(example) else example)
    return examples


def other_inputs(inputs: Inputs, count: int) -> Iterator[tuple[int, Example, int]]:
    """Yield the inputs that `first_inputs` leaves out; all, if those are all that there are.

    Yields:
        The number of the batch among this rank's, what is left of it, and how many inputs that is.
    """
    left = torch.tensor([_count_left(inputs, n, count) for n in range(len(inputs))])
    total = left.sum(dtype=torch.float64)
    inputs.ranks.sum_(total)
    for number, size in enumerate(left.tolist()):
        whole = inputs.size_of(number)
        if not total or size == whole:
            yield number, inputs[number], whole
        elif size:
            yield number, _cut(inputs[number], slice(whole - size, None)), size


def _count_left(inputs: Inputs, number: int, count: int) -> int:
    """Return how many inputs of a batch are not among the first."""
    size = inputs.size_of(number)
    taken = min(max(count - inputs.offset_of(number), 0), size)
    if 0 < taken < size and not _can_be_cut(inputs[number]):
        return 0
    return size - taken


def _can_be_cut(example: Example) -> bool:
    """Tell whether all tensors of a batch have one row for each input."""
    return len({t.shape[:1] for t in tensors_in((example.args, dict(example.kwargs)))}) == 1


def _cut(example: Example, rows: slice) -> Example:
    """Keep some inputs of a batch."""
    return map_tensors(example, lambda tensor: tensor[rows])
