"""Matrix products in full precision, whatever settings the caller uses for training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable autocast, TF32 and bfloat16 products.

    They would make close filters equal, and lose digits that ill-conditioned equations need.
    Autocast's cache would also keep outdated weights.
    """
    backends: list[Any] = [torch.backends.cuda, torch.backends.mkldnn]
    products = [(backend.matmul, backend) for backend in backends if hasattr(backend, "matmul")]
    modern = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9 and later
    name, full = ("fp32_precision", "ieee") if modern else ("allow_tf32", False)
    reduced = []
    for product, backend in products:
        if (previous := getattr(product, name)) in ("tf32", "bf16", True):
            above = [getattr(place, name, None) for place in (backend, torch.backends)]
            inherited = modern and previous in above  # leave it unset
            reduced.append((product, "none" if inherited else previous))
    try:
        for product, _ in reduced:
            setattr(product, name, full)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for product, previous in reduced:
            setattr(product, name, previous)
