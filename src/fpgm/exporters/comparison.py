"""Two ONNX models beside each other: what the second loses, and what it gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fpgm.exporters.onnx import OnnxModule, input_arrays, session_of
from fpgm.utils.example_inputs import Example, resized, squared, tensors_in
from fpgm.utils.machine_load import Neighbours
from fpgm.utils.timing import ratio, side_by_side

_SECONDS = 2.0
"""Time given to the comparison."""


@dataclass(frozen=True)
class Beside:
    """A model beside the one it was made from, in ONNX Runtime; one input, if it may be one."""

    bytes_before: int
    error: float
    """Squared difference of the outputs, as a share of their squares."""
    seconds_before: float
    seconds: float
    """That, divided by how many times as fast it was turn by turn."""
    faster: float
    threads: int
    crowd: str | None = None
    """What others did meanwhile, if times are not to be relied on for it."""


def compared(before: bytes, after: bytes, examples: Sequence[Example], batch: int) -> Beside:
    """Outputs on the examples, and time on so many inputs."""
    threads = torch.get_num_threads()
    error = lost(before, after, examples)
    one = resized(examples[0], batch)
    neighbours = Neighbours()
    slow, fast = side_by_side([_timed(data, one, threads) for data in (before, after)], _SECONDS)
    faster = ratio(slow, fast)
    return Beside(
        len(before), error, slow.median, slow.median / faster, faster, threads,
        neighbours.crowd(threads),
    )  # fmt: skip


def lost(before: bytes, after: bytes, examples: Sequence[Example]) -> float:
    """Squared difference of the outputs, as a share of their squares."""
    missed = size = 0.0
    nets = OnnxModule(before), OnnxModule(after)
    for example in examples:
        wanted, given = (tensors_in(example.call(net)) for net in nets)
        for w, g in zip(wanted, given, strict=True):
            missed += squared(g, w)
            size += squared(torch.zeros_like(w), w)
    return missed / (size or 1.0)


def _timed(data: bytes, example: Example, threads: int) -> Callable[[], Any]:
    session, feed = session_of(data, threads), input_arrays(data, example)
    return lambda: session.run(None, feed)
