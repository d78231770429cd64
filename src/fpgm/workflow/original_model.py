"""The original model of a run and its example input, the same in every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import load_model
from fpgm.recovery.api import device_memory
from fpgm.utils.rng import seed_everything

SEED = 0
"""Fresh weights and example inputs are the same in every run."""


def build_model(spec: str, weights: Path | None) -> nn.Module:
    """Build the model a spec names, in eval mode; without a weights file its values are seeded."""
    seed_everything(SEED)
    model = load_model(spec)
    return (load_weights(model, weights) if weights else model).eval()


def example_input(shape: Sequence[int]) -> Tensor:
    """Return noise of a shape, the same in every run."""
    size = 4 * math.prod(shape)
    if size > device_memory(None):
        raise RequestError(f"An input of {shape_text(shape)} is larger than this machine's memory.")
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(SEED))


def shape_text(shape: Sequence[int]) -> str:
    """Write sizes as `--input` takes them.

    >>> shape_text((1, 3, 8, 8))
    '1x3x8x8'
    """
    return "x".join(str(size) for size in shape)
