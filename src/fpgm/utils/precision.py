"""Precision of products: full for solving and comparing, bfloat16 for training where it is fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def has_fast_bfloat16(device: torch.device) -> bool:
    """Tell whether a device multiplies bfloat16 faster than float32, in hardware."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # an older version
        return False
    capabilities: Mapping[str, Any] = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def bfloat16_autocast(device: torch.device, enabled: bool = True) -> torch.autocast:
    """Return a context in which products of float32 tensors are computed in bfloat16.

    Without a cache of converted weights: inside another autocast context, such as that of
    `full_precision`, it would outlive this one and keep weights that training has changed since.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)
