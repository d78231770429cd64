"""Eight-bit ONNX for ONNX Runtime: the paper's outlook, pruning with low-precision weights.

Static quantisation: how large activations get is looked up beforehand, on a few hundred inputs.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fpgm.errors import ModelError
from fpgm.exporters.onnx import input_arrays
from fpgm.utils.example_inputs import Example
from fpgm.utils.locking import quietly
from fpgm.utils.text import reason

RUINED = 0.5
"""Squared error of the outputs, as a share of their squares, beyond which no file is left: half of
what it says would be error. A model that takes eight bits well loses a few hundredths."""


def to_int8(data: bytes, examples: Iterable[Example], told: Mapping[str, str]) -> bytes:
    """The model with eight-bit weights, one scale a filter, and eight-bit activations.

    What is `told` goes into the file's own description. Weights use seven of the eight bits where
    the processor multiplies bytes in pairs and would overflow otherwise (no VNNI).
    """
    import onnx
    from onnxruntime import quantization as q

    with tempfile.TemporaryDirectory() as folder, quietly():
        plain, ready, small = (Path(folder) / name for name in ("a.onnx", "b.onnx", "c.onnx"))
        plain.write_bytes(data)
        level = logging.getLogger().level
        logging.getLogger().setLevel(logging.ERROR)  # it advises on the root logger
        try:
            q.shape_inference.quant_pre_process(plain, ready, skip_symbolic_shape=True)
            q.quantize_static(
                ready,
                small,
                _Reader(input_arrays(data, example) for example in examples),
                quant_format=q.QuantFormat.QDQ,
                per_channel=True,
                reduce_range=not _multiplies_bytes(),
                activation_type=q.QuantType.QUInt8,
                weight_type=q.QuantType.QInt8,
            )
        except Exception as error:
            raise ModelError(
                f"ONNX Runtime cannot quantise this model: {reason(error)}."
            ) from error
        finally:
            logging.getLogger().setLevel(level)
        proto = onnx.load(small)
    known = {entry.key: entry.value for entry in proto.metadata_props}
    onnx.helper.set_model_props(proto, known | dict(told))
    made: bytes = proto.SerializeToString()
    return made


class _Reader:
    """Inputs, one at a time, as the quantiser asks for them."""

    def __init__(self, inputs: Iterable[dict[str, Any]]) -> None:
        self._inputs: Iterator[dict[str, Any]] = iter(inputs)

    def get_next(self) -> dict[str, Any] | None:
        """The next, or None after the last."""
        return next(self._inputs, None)


def _multiplies_bytes() -> bool:
    """Whether the processor multiplies and adds bytes without overflow."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "vnni" in flags or "asimddp" in flags
