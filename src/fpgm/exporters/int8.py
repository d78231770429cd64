"""Quantize an ONNX model to int8 for ONNX Runtime.

Static quantization: the range of activations is calibrated beforehand on a few hundred inputs. The
paper names low-precision weights as a next step after pruning.
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
from fpgm.utils.text import reason
from fpgm.utils.thread_lock import suppress_warnings

MAX_ERROR = 0.5
"""Squared output error, relative to the outputs' squares, beyond which no file is written. A model
that suits int8 has an error of a few hundredths."""


def to_int8(data: bytes, examples: Iterable[Example], metadata: Mapping[str, str]) -> bytes:
    """Quantize weights (one scale per filter) and activations to int8.

    Weights use seven of the eight bits on processors without VNNI, which add products of bytes in
    pairs and would overflow otherwise.

    Args:
        data: the float model.
        examples: calibration inputs.
        metadata: added to that of the file.
    """
    import onnx
    from onnxruntime import quantization as q

    with tempfile.TemporaryDirectory() as folder, suppress_warnings():
        plain, ready, small = (Path(folder) / name for name in ("a.onnx", "b.onnx", "c.onnx"))
        plain.write_bytes(data)
        level = logging.getLogger().level
        logging.getLogger().setLevel(
            logging.ERROR
        )  # the quantizer writes advice to the root logger
        try:
            q.shape_inference.quant_pre_process(plain, ready, skip_symbolic_shape=True)
            q.quantize_static(
                ready,
                small,
                _CalibrationReader(input_arrays(data, example) for example in examples),
                quant_format=q.QuantFormat.QDQ,
                per_channel=True,
                reduce_range=not _has_int8_dot_product(),
                activation_type=q.QuantType.QUInt8,
                weight_type=q.QuantType.QInt8,
            )
        except Exception as error:
            raise ModelError(
                f"ONNX Runtime cannot quantize this model: {reason(error)}."
            ) from error
        finally:
            logging.getLogger().setLevel(level)
        proto = onnx.load(small)
    existing = {entry.key: entry.value for entry in proto.metadata_props}
    onnx.helper.set_model_props(proto, existing | dict(metadata))
    quantised: bytes = proto.SerializeToString()
    return quantised


class _CalibrationReader:
    """Gives the quantizer one calibration input after the other."""

    def __init__(self, inputs: Iterable[dict[str, Any]]) -> None:
        self._inputs: Iterator[dict[str, Any]] = iter(inputs)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next input, or None after the last."""
        return next(self._inputs, None)


def _has_int8_dot_product() -> bool:
    """Tell whether the processor multiplies and adds bytes without overflow."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "vnni" in flags or "asimddp" in flags
