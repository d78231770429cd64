"""How rectified Gaussians vary together: what can be known of activations without any data.

A batch norm says how its output is distributed: normal, with its shift as mean and its scale as
spread. Two units see the same input, so the angle between their filters says how they correlate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TERMS = 4
"""Of the Hermite expansion: constant, linear, and the two that bend."""


def rectified(mean: Tensor, spread: Tensor) -> Tensor:
    """Hermite coefficients [TERMS, n] of max(0, mean + spread · u) for normal u.

    The first is its mean; the squares of the others add up to its variance.

    >>> mean, *rest = rectified(torch.tensor([0.0]), torch.tensor([1.0]))[:, 0].tolist()
    >>> round(mean, 4), round(sum(c * c for c in rest), 3)  # 1/√2π; (1 − 1/π)/2, 0.341 in full
    (0.3989, 0.33)
    """
    spread = spread.clamp(min=1e-12)
    t = mean / spread
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(t)
    return torch.stack(
        [
            mean * share + spread * density,
            spread * share,
            spread * density / math.sqrt(2),
            -spread * t * density / math.sqrt(6),
        ]
    )


def covariance(coefficients: Tensor, correlation: Tensor) -> Tensor:
    """How units with these expansions vary together, given how their inputs correlate."""
    total = torch.zeros_like(correlation)
    for order in range(1, TERMS):
        c = coefficients[order]
        total += c[:, None] * c[None] * correlation**order
    return total
