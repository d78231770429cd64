"""Hugging Face Trainer: `Trainer(callbacks=[TrainerPruneCallback(example_inputs, rate=0.4)])`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from fpgm.errors import FileError, FpgmError
from fpgm.utils.atomic_io import write_text
from fpgm.utils.example_inputs import to_model_device
from fpgm.workflow.soft_pruner import SoftPruner, Step

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise FpgmError('Transformers is not installed: pip install "fpgm[hf]"') from error

STATE = "fpgm.json"
"""Name of the pruner's state file in each of the Trainer's checkpoints."""


class TrainerPruneCallback(TrainerCallback):
    """Prunes after every training epoch; after training, `compact` is the smaller network.

    Options are those of `SoftPruner`. Resuming works from a checkpoint in the output directory.
    """

    def __init__(self, example_inputs: Any, **options: Any) -> None:
        self.example_inputs = example_inputs
        self.options = options
        self.pruner: SoftPruner | None = None
        self.steps: list[Step] = []
        self.compact: nn.Module | None = None

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **others: Any,
    ) -> None:
        """Create the pruner: the optimizer exists now. The Trainer passes these arguments."""
        inputs = to_model_device(model, self.example_inputs)
        self.pruner = SoftPruner(model, inputs, optimizer=optimizer, **self.options)
        if state.global_step > 0:
            self.pruner.load_state_dict(_read(_path(args, state)))
            # A checkpoint saved on an epoch's last step comes before that epoch's pruning.
            while self.pruner.epoch < int(state.epoch):
                self.steps.append(self.pruner.step())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Prune."""
        assert self.pruner is not None
        self.steps.append(self.pruner.step())

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Add the pruner's state to the checkpoint."""
        if state.is_world_process_zero and self.pruner is not None:
            write_text(_path(args, state), json.dumps(self.pruner.state_dict()))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Compact the network and verify it."""
        assert self.pruner is not None
        self.compact = self.pruner.compact()


def _path(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FileError(
            f"Training is resumed, but '{path}' cannot be read: resume from a checkpoint in the "
            "output directory that was written with this callback."
        ) from error
