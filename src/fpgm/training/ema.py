"""The running average of a network's weights and statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]


class ExponentialAverage(AveragedModel):
    """Exponential moving average; over few steps at first, so that early weights fade quickly."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=self._blend, use_buffers=True)
        self.decay = decay

    def restart(self, model: nn.Module) -> None:
        """Start again from the current weights, as after pruning."""
        self.n_averaged.zero_()
        self.update_parameters(model)

    @torch.no_grad()
    def _blend(self, averages: Tensors, values: Tensors, _: Tensor | int) -> None:
        count = int(self.n_averaged)
        share = 1 - min(self.decay, (1 + count) / (10 + count))
        if averages[0].is_floating_point() or averages[0].is_complex():
            torch._foreach_lerp_(averages, values, share)
        else:  # counters have no average
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)
