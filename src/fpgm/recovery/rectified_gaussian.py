"""Mean and covariance of rectified Gaussians, a model of activations that needs no data.

The output of a batch norm is modeled as normal, with the norm's shift as mean and its scale as
standard deviation. The angle between two filters gives their correlation. After a ReLU, both follow
from a short Hermite expansion.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TERMS = 4
"""Terms of the Hermite expansion: constant, linear, quadratic and cubic."""


def hermite_coefficients(mean: Tensor, std: Tensor) -> Tensor:
    """Expand max(0, mean + std · u) for normal u into Hermite coefficients [TERMS, n].

    The first is its mean; the squares of the others add up to its variance.

    >>> mean, *rest = hermite_coefficients(torch.tensor([0.0]), torch.tensor([1.0]))[:, 0].tolist()
    >>> round(mean, 4), round(sum(c * c for c in rest), 3)  # 1/√2π; (1 − 1/π)/2, 0.341 in full
    (0.3989, 0.33)
    """
    std = std.clamp(min=1e-12)
    t = mean / std
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    positive = torch.special.ndtr(t)  # probability that the ReLU passes the value on
    return torch.stack(
        [
            mean * positive + std * density,
            std * positive,
            std * density / math.sqrt(2),
            -std * t * density / math.sqrt(6),
        ]
    )


def rectified_covariance(coefficients: Tensor, correlation: Tensor) -> Tensor:
    """Compute the covariance of units with these expansions from the correlation of their inputs.

    Args:
        coefficients: what `hermite_coefficients` returned, [TERMS, n].
        correlation: of the values before the ReLU, [n, n].
    """
    total = torch.zeros_like(correlation)
    for order in range(1, TERMS):
        c = coefficients[order]
        total += c[:, None] * c[None] * correlation**order
    return total
