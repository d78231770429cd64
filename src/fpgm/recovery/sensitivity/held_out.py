"""Divide inputs into the first batches, to measure errors on, and the others, to solve with.

Errors on the inputs that a layer was solved with say nothing if the layer has more weights than
there are inputs: a classifier behind a global pooling then fits them exactly. Batches stay whole,
because only the loader knows how to divide one. A single batch serves both purposes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from fpgm.utils.calibration_data import Inputs
from fpgm.utils.example_inputs import Example


def first_batches(inputs: Inputs, count: int) -> int:
    """Return how many batches, of all ranks, have the first `count` inputs; never all of several.

    >>> inputs = Inputs()
    >>> for _ in range(3):
    ...     inputs.add(Example((), {}), 10)
    >>> [first_batches(inputs, count) for count in (0, 10, 11, 30)]
    [0, 1, 2, 2]
    """
    if not count:
        return 0
    numbers = [bisect_left(inputs.ends, count) + 1, max(inputs.batches - 1, 1)]
    return min(numbers)


def first_inputs(inputs: Inputs, count: int) -> list[Example]:
    """Return those of the first batches that this rank has."""
    batches = first_batches(inputs, count)
    return [inputs[n] for n in range(len(inputs)) if inputs.number_of(n) < batches]


def other_inputs(inputs: Inputs, count: int) -> Iterator[tuple[int, Example, int]]:
    """Yield this rank's batches that `first_inputs` leaves out; a single batch all the same.

    Yields:
        The number of the batch among this rank's, the batch, and how many inputs it has.
    """
    batches = first_batches(inputs, count) if inputs.batches > 1 else 0
    for number in range(len(inputs)):
        if inputs.number_of(number) >= batches:
            yield number, inputs[number], inputs.size_of(number)
