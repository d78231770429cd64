"""Print by how many bytes this process grows when it loads and runs a model.

    python _memory_probe.py onnxruntime|openvino MODEL.onnx INPUTS.npz THREADS

It imports nothing but the runtime, so that nothing else is counted.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def _load(runtime: str, model: str, threads: int) -> Callable[[Any], Any]:
    """Load a model in a runtime; return a function that runs it."""
    if runtime == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return lambda feed: session.run(None, feed)
    import openvino

    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
    return lambda feed: request.infer(feed)


def _status_bytes(name: str) -> int:
    """Read a size of this process from /proc, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main(runtime: str, model: str, inputs: str, threads: str) -> None:
    """Load the model, run it twice, and print the growth."""
    feed = dict(np.load(inputs))
    __import__(runtime)
    before = _status_bytes("VmRSS")
    run = _load(runtime, model, int(threads))
    run(feed)
    ctypes.CDLL(None).malloc_trim(0)  # memory that only loading needed
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the present size
    run(feed)
    sys.stdout.write(f"{_status_bytes('VmHWM') - before}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
