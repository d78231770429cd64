"""Code that loads the model of a run, in PyTorch and in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from json import dumps
from shlex import quote

from fpgm.report.layers import truncate_middle
from fpgm.report.run import Run
from fpgm.utils.run_files import SMALL

_PYTHON = """\
import fpgm
from fpgm.models.registry import load_model

def original():  # the architecture only
    return load_model({spec})

model = fpgm.load({file}, original).eval()"""

_ONNX = """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("small.onnx")
name = session.get_inputs()[0].name
images = np.zeros({shape}, np.float32)
outputs = session.run(None, {{name: images}})"""


@dataclass(frozen=True)
class Snippet:
    """One way to use a model: its heading, and pieces of code in their order."""

    title: str
    parts: tuple[str, ...]


def snippets(run: Run) -> list[Snippet]:
    """List the ways to use the model of a run; none if it was not pruned."""
    return [] if run.plan is None or not run.model else list(_snippets(run))


def _snippets(run: Run) -> Iterator[Snippet]:
    spec = truncate_middle(run.model)
    yield Snippet("In PyTorch", (_PYTHON.format(file=dumps(SMALL), spec=dumps(spec)),))
    shape = tuple(int(size) for size in run.results.input if size is not None)
    if shape:  # only folders of `fpgm prune` know it, and can be exported by a command
        trust = f" --model {quote(spec)}" if ".py:" in spec else ""
        yield Snippet("In ONNX Runtime", (f"fpgm export .{trust}", _ONNX.format(shape=shape)))
