"""Compare two ONNX models: the output error of the second, and its speedup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fpgm.exporters.onnx import OnnxModule, create_session, input_arrays
from fpgm.utils.example_inputs import Example, resize_batch, squared_error, tensors_in
from fpgm.utils.machine_load import MachineLoad
from fpgm.utils.timing import time_interleaved, time_ratio

_SECONDS = 2.0
"""Time to spend on the comparison."""


@dataclass(frozen=True)
class ModelComparison:
    """A model compared with the one it was derived from, in ONNX Runtime.

    Times are of one input, or of the batch size that the model is fixed to.
    """

    bytes_before: int
    error: float
    """Squared difference of the outputs, relative to their squares."""
    seconds_before: float
    seconds: float
    """`seconds_before` divided by `faster`."""
    faster: float
    """Speedup: the median of paired runs."""
    threads: int
    crowd: str | None = None
    """Load by other processes, if it makes the times unreliable."""


def compare_models(
    before: bytes, after: bytes, examples: Sequence[Example], batch: int
) -> ModelComparison:
    """Compare outputs on all examples, and time on one batch of this size."""
    threads = torch.get_num_threads()
    error = output_error(before, after, examples)
    timed = resize_batch(examples[0], batch)
    load = MachineLoad()
    first, second = time_interleaved(
        [_load_runner(data, timed, threads) for data in (before, after)], _SECONDS
    )
    faster = time_ratio(first, second)
    return ModelComparison(
        len(before), error, first.median, first.median / faster, faster, threads,
        load.describe_contention(threads),
    )  # fmt: skip


def output_error(before: bytes, after: bytes, examples: Sequence[Example]) -> float:
    """Compute the squared difference of the outputs, relative to their squares."""
    error = size = 0.0
    nets = OnnxModule(before), OnnxModule(after)
    for example in examples:
        targets, outputs = (tensors_in(example.call(net)) for net in nets)
        for target, output in zip(targets, outputs, strict=True):
            error += squared_error(output, target)
            size += squared_error(torch.zeros_like(target), target)
    return error / (size or 1.0)


def _load_runner(data: bytes, example: Example, threads: int) -> Callable[[], Any]:
    """Load a model; return a function that runs it on the example."""
    session, feed = create_session(data, threads), input_arrays(data, example)
    return lambda: session.run(None, feed)
