"""Loss and accuracy, over all processes."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fpgm.data.base import Batches


class Figures:
    """Loss and accuracy so far, kept on the device so that counting does not hold training up."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=_precise(device), device=device)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        right = (logits.argmax(1) == labels).sum()
        self._sums += torch.stack(
            [loss, right, torch.tensor(float(len(labels)), device=loss.device)]
        ).to(self._sums)

    def so_far(self, start: float) -> dict[str, float]:
        loss, right, count = self._sums.tolist()
        return {
            "loss": loss / max(count, 1),
            "accuracy": right / max(count, 1),
            "images_per_second": count / max(time.perf_counter() - start, 1e-9),
        }

    def summed(self, accelerator: Accelerator) -> Figures:
        """Over all processes."""
        total = Figures(self._sums.device)
        total._sums = accelerator.reduce(self._sums, "sum")
        return total

    @property
    def count(self) -> int:
        return int(self._sums[2])

    @property
    def loss(self) -> float:
        return float(self._sums[0]) / max(self.count, 1)

    @property
    def accuracy(self) -> float:
        return float(self._sums[1]) / max(self.count, 1)


@torch.no_grad()
def accuracy(net: nn.Module, batches: Batches, accelerator: Accelerator) -> float:
    """Share of pictures that a network gets right, over all processes."""
    net.eval()
    right = torch.zeros(2, dtype=_precise(accelerator.device), device=accelerator.device)
    for batch in batches.epoch(0):
        if len(batch.labels):  # a process may have no picture of the last batch
            with accelerator.autocast():
                found = net(batch.images).argmax(1) == batch.labels
            right += torch.tensor([found.sum(), len(found)], device=right.device)
    right = accelerator.reduce(right, "sum")
    return float(right[0] / right[1].clamp(min=1))


def _precise(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no doubles


@torch.no_grad()
def filter_norms(net: nn.Module) -> dict[str, Tensor]:
    """Norms of all filters, by layer: what a norm-based criterion sees of them.

    >>> net = nn.Linear(2, 2)
    >>> _ = net.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    >>> filter_norms(net)
    {'weight': tensor([5., 1.])}
    """
    return {
        name: torch.linalg.vector_norm(weight.detach().flatten(1).float(), dim=1).cpu()
        for name, weight in net.named_parameters()
        if weight.ndim > 1
    }
