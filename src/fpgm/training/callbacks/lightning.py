"""PyTorch Lightning: `Trainer(callbacks=[PruneCallback(example_inputs, rate=0.4)])`."""

from __future__ import annotations

from typing import Any

from torch import nn

from fpgm.errors import FpgmError, RequestError
from fpgm.utils.example_inputs import to_model_device
from fpgm.workflow.soft_pruner import SoftPruner, Step

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise FpgmError('Lightning is not installed: pip install "fpgm[lightning]"') from error


class PruneCallback(pl.Callback):
    """Prunes after every training epoch; after training, `compact` is the smaller network.

    Options are those of `SoftPruner`. `attribute` names the network inside the Lightning module
    (`"model"` for `self.model`); without it the Lightning module itself is pruned.
    """

    def __init__(self, example_inputs: Any, *, attribute: str = "", **options: Any) -> None:
        self.example_inputs = example_inputs
        self.attribute = attribute
        self.options = options
        self.pruner: SoftPruner | None = None
        self.steps: list[Step] = []
        self.compact: nn.Module | None = None
        self._saved: dict[str, Any] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Create the pruner once the optimizers exist."""
        if len(trainer.optimizers) != 1:
            raise RequestError(
                f"PruneCallback needs one optimizer; this module has {len(trainer.optimizers)}."
            )
        network = pl_module.get_submodule(self.attribute)
        inputs = to_model_device(network, self.example_inputs)
        self.pruner = SoftPruner(network, inputs, optimizer=trainer.optimizers[0], **self.options)
        if self._saved is not None:
            self.pruner.load_state_dict(self._saved)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prune, and log how many units are zeroed and how many have changed."""
        assert self.pruner is not None
        step = self.pruner.step()
        self.steps.append(step)
        if step.share is not None:
            pl_module.log("fpgm/zeroed", float(step.zeroed))
            pl_module.log("fpgm/changed", float(step.changed))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compact the network and verify it."""
        assert self.pruner is not None
        self.compact = self.pruner.compact()

    def state_dict(self) -> dict[str, Any]:
        """Return the pruner's state for Lightning's checkpoints."""
        return {} if self.pruner is None else self.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state from a checkpoint, before the pruner exists."""
        self._saved = state_dict or None
