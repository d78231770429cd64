"""How near two answers to the same question are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference of an output, as a share of its largest number, that is rounding."""


def difference(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest difference of an output, as a share of its largest number; inf if not comparable.

    >>> difference([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 4.0])])
    0.5
    >>> difference([torch.tensor([torch.nan, 2.0])], [torch.tensor([1.0, 2.0])])
    inf
    """
    if [t.shape for t in given] != [t.shape for t in wanted]:
        return math.inf
    worst = 0.0
    for mine, theirs in zip(given, wanted, strict=True):
        g, w = mine.detach().cpu(), theirs.detach().cpu()
        finite = w.isfinite()
        if not torch.equal(g.isfinite(), finite) or not torch.equal(
            g[~finite].nan_to_num().float(), w[~finite].nan_to_num().float()
        ):
            return math.inf
        if bool(finite.any()):
            g, w = g[finite].double(), w[finite].double()
            size = float(w.abs().max()) or 1.0
            worst = max(worst, float((g - w).abs().max()) / size)
    return worst
