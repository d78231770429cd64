"""Keep solved layers in a file, so that an interrupted recovery continues from the last one.

The file holds the compact model's tensors and the results so far. It is used only for the same
model, plan, start and inputs, and removed when recovery is done.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from fpgm._version import __version__
from fpgm.errors import FileError
from fpgm.pruning.plan import Plan
from fpgm.recovery.layer_solver import SolvedLayer
from fpgm.utils.atomic_io import atomic_write, explain_write_errors
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.modules import tensors_sha256
from fpgm.utils.safetensors_io import read_tensors

METADATA = "fpgm_solved"
WRITE_EVERY = 10.0
"""Seconds between two writes; what an interruption can cost."""


class SolveCache:
    """The file of one recovery."""

    def __init__(
        self, file: Path, model: nn.Module, small: nn.Module, plan: Plan, inputs: Inputs
    ) -> None:
        """Identify the recovery; the file is neither read nor written yet."""
        self.file = file
        parts = (
            __version__,
            tensors_sha256(model),
            tensors_sha256(small),
            plan.to_json(),
            inputs.digest(),
        )
        self._key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        self._written = time.perf_counter()

    def read_(self, small: nn.Module, layers: Sequence[str]) -> list[SolvedLayer]:
        """Load the solved layers into the compact model; none if the file is of something else.

        Args:
            small: the compact model.
            layers: paths of all layers to solve, in order.
        """
        if not self.file.exists():
            return []
        try:
            tensors, metadata = read_tensors(self.file)
            stored = json.loads(metadata[METADATA])
            if stored["key"] != self._key:
                return []
            solved = [SolvedLayer(**layer) for layer in stored["solved"]]
            if [layer.layer for layer in solved] != list(layers[: len(solved)]):
                return []  # the model's code has changed
            small.load_state_dict(tensors)
        except (FileError, KeyError, TypeError, ValueError, RuntimeError):
            return []  # damaged, or of another version: begin again
        return solved

    def write(self, small: nn.Module, solved: Sequence[SolvedLayer], *, now: bool = False) -> None:
        """Write the layers solved so far, unless they were written a moment ago."""
        if not now and time.perf_counter() - self._written < WRITE_EVERY:
            return
        tensors = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in small.state_dict().items()
        }
        text = json.dumps({"key": self._key, "solved": [asdict(layer) for layer in solved]})
        with explain_write_errors(self.file), atomic_write(self.file) as part:
            save_file(tensors, part, {METADATA: text})
        self._written = time.perf_counter()

    def remove(self) -> None:
        """Remove the file: recovery is done."""
        self.file.unlink(missing_ok=True)
