"""Loss and accuracy, over all processes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fpgm.data.base import Batches
from fpgm.utils.accuracy import AccuracyCounter


class RunningMetrics:
    """Loss and accuracy so far, kept on the device so that counting does not slow down training."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=_sum_dtype(device), device=device)
        self._counter = AccuracyCounter()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count a batch, of which `loss` is the sum."""
        self._loss += loss.to(self._loss)
        self._counter.add(logits, labels)

    def summarize(self, start: float) -> dict[str, float]:
        """Summarize this process's part of an epoch that began at `start`."""
        count = self._counter.total
        return {
            "loss": float(self._loss) / max(count, 1),
            "accuracy": self._counter.accuracy or 0.0,
            "images_per_second": count / max(time.perf_counter() - start, 1e-9),
        }

    def reduce(self, accelerator: Accelerator) -> EpochMetrics:
        """Sum over all processes."""
        sums = torch.cat([self._loss[None], self._counter.sums(self._loss)])
        loss, correct, count = accelerator.reduce(sums, "sum").tolist()
        return EpochMetrics(loss / max(count, 1), correct / max(count, 1), int(count))


@dataclass(frozen=True)
class EpochMetrics:
    """Loss, accuracy and the number of images, over all processes."""

    loss: float
    accuracy: float
    count: int


@torch.no_grad()
def evaluate_accuracy(net: nn.Module, batches: Batches, accelerator: Accelerator) -> float:
    """Measure a network's accuracy, over all processes."""
    net.eval()
    metrics = RunningMetrics(accelerator.device)
    for batch in batches.epoch(0):
        if len(batch.labels):  # a process may have no image of the last batch
            with accelerator.autocast():
                logits = net(batch.images)
            metrics.add(torch.zeros(()), logits, batch.labels)
    return metrics.reduce(accelerator).accuracy


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


@torch.no_grad()
def filter_norms(net: nn.Module) -> dict[str, Tensor]:
    """Return the norms of all filters, by layer.

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
