"""Hugging Face Trainer: `Trainer(callbacks=[PruneCallback(example_inputs, rate=0.4)])`."""

from __future__ import annotations

from typing import Any

from torch import nn

from fpgm.errors import FpgmError
from fpgm.soft import SoftPruner, Step

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ImportError as error:
    raise FpgmError("Transformers is not installed: pip install 'fpgm[hf]'.") from error


class PruneCallback(TrainerCallback, ExportableState):
    """Prunes at the end of every training epoch; afterwards `compact` is the smaller network.

    Options are those of `SoftPruner`. The Trainer keeps its state in the checkpoints.
    """

    def __init__(self, example_inputs: Any = None, **options: Any) -> None:
        self.example_inputs = example_inputs
        self.options = options
        self.pruner: SoftPruner | None = None
        self.steps: list[Step] = []
        self.compact: nn.Module | None = None
        self.saved: dict[str, Any] | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        """Watch the network once the optimizer exists."""
        options = dict(self.options)
        if options.get("mode") == "hard":
            options["optimizer"] = others["optimizer"]
        self.pruner = SoftPruner(model, self.example_inputs, **options)
        if self.saved is not None:
            self.pruner.load_state_dict(self.saved)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Prune."""
        assert self.pruner is not None
        self.steps.append(self.pruner.step())

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The compact network, verified."""
        assert self.pruner is not None
        self.compact = self.pruner.compact()

    def state(self) -> dict[str, Any]:
        """Goes into the Trainer's checkpoints; only the attributes come back."""
        saved = None if self.pruner is None else self.pruner.state_dict()
        return {"args": {}, "attributes": {"saved": saved}}
