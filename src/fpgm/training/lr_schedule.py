"""The learning rate as a function of training progress, so it has no state to resume."""

from __future__ import annotations

from fpgm.training.recipe import TrainConfig
from fpgm.utils.training_loop import cosine_decay


def learning_rate(train: TrainConfig, passed: float) -> float:
    """Return the learning rate after `passed` epochs, fractions included.

    >>> part = TrainConfig(epochs=10, lr=1.0, schedule="step", milestones=(5, 8), gamma=0.1)
    >>> [round(learning_rate(part, epoch), 4) for epoch in (0, 4.9, 5, 8)]
    [1.0, 1.0, 0.1, 0.01]
    """
    if passed < train.warmup:
        if train.warmup_lr is not None:
            return train.warmup_lr
        return train.lr * passed / train.warmup
    if train.schedule == "step":
        return train.lr * train.gamma ** sum(passed >= m for m in train.milestones)
    share = min((passed - train.warmup) / max(train.epochs - train.warmup, 1), 1.0)
    if train.schedule == "cosine":
        return train.lr * cosine_decay(share)
    if train.schedule == "linear":
        return train.lr * (1 - share)
    return train.lr
