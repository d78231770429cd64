"""Counts a classifier's correct predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AccuracyCounter:
    """Counts correct predictions; the count stays on the device until it is read.

    >>> counter = AccuracyCounter()
    >>> counter.add(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    True
    >>> counter.accuracy
    0.5
    """

    def __init__(self) -> None:
        self.total = 0
        self._correct: Tensor | None = None

    def add(self, outputs: Any, labels: Tensor) -> bool:
        """Count a batch; return False, without counting, if there is no row of scores per label."""
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(labels):
            return False
        correct = (outputs.argmax(1) == labels.to(outputs.device)).sum()
        self._correct = correct if self._correct is None else self._correct + correct
        self.total += len(labels)
        return True

    @property
    def correct(self) -> int:
        return 0 if self._correct is None else int(self._correct)

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct predictions; None before the first batch."""
        return self.correct / self.total if self.total else None

    def sums(self, like: Tensor) -> Tensor:
        """Return the correct and the total count as one tensor, without waiting for the device."""
        correct = like.new_zeros(()) if self._correct is None else self._correct.to(like)
        return torch.stack([correct, like.new_tensor(self.total)])
