"""Compare the outputs of two versions of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""Largest relative difference that rounding can explain."""


def relative_difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Compute the largest difference, relative to each output's largest value.

    It is inf if shapes or values that are not finite differ.

    >>> relative_difference([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 4.0])])
    0.5
    >>> relative_difference([torch.tensor([torch.nan, 2.0])], [torch.tensor([1.0, 2.0])])
    inf
    """
    if [t.shape for t in outputs] != [t.shape for t in expected]:
        return math.inf
    largest = 0.0
    for output, reference in zip(outputs, expected, strict=True):
        a, b = output.detach().cpu(), reference.detach().cpu()
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite) or not torch.equal(
            a[~finite].nan_to_num().float(), b[~finite].nan_to_num().float()
        ):
            return math.inf
        if bool(finite.any()):
            a, b = a[finite].double(), b[finite].double()
            size = float(b.abs().max()) or 1.0
            largest = max(largest, float((a - b).abs().max()) / size)
    return largest
