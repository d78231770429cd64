"""The training loss: cross-entropy, with label smoothing and distillation from a teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpgm.training.recipe import DistillConfig


class Loss:
    """Sums the loss over a batch, so that parts of a batch can be added up."""

    def __init__(
        self,
        label_smoothing: float = 0.0,
        distill: DistillConfig | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        self.label_smoothing = label_smoothing
        self.distill, self.teacher = distill, teacher

    def __call__(self, logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(
            logits.float(), labels, label_smoothing=self.label_smoothing, reduction="sum"
        )
        if self.distill is None or self.teacher is None:
            return loss
        with torch.no_grad():
            teacher_logits = self.teacher(images).float()
        soft = distillation_loss(logits.float(), teacher_logits, self.distill.temperature)
        return (1 - self.distill.share) * loss + self.distill.share * soft


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Compute the KL divergence at a temperature, scaled so that gradients keep their size.

    For training with labels and a teacher. `recovery.distillation`, without labels, has its own.

    >>> x = torch.tensor([[1., 2.]])
    >>> distillation_loss(x, x, 4.0)
    tensor(0.)
    """
    student = F.log_softmax(logits / temperature, 1)
    teacher = F.log_softmax(teacher_logits / temperature, 1)
    return F.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2
