"""Denormal numbers: they do not affect results, and slow down processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fpgm.utils.modules import named_tensors

_WIDE = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes whose denormals are below 1e-37; in float16 they are regular values."""

_CHUNK = 2**16
"""Numbers per chunk: few enough to stay in the processor's cache."""


@torch.no_grad()
def count_denormals(model: nn.Module) -> int:
    """Count the denormal weights."""
    tensors = _wide_tensors(model)
    if not _has_denormals(tensors):
        return 0
    return sum(int(_denormal_mask(t).sum()) for t in tensors)


@torch.no_grad()
def flush_denormals_(model: nn.Module) -> None:
    """Set denormal weights to zero."""
    tensors = _wide_tensors(model)
    if not _has_denormals(tensors):
        return
    for tensor in tensors:
        if bool((mask := _denormal_mask(tensor)).any()):
            tensor.masked_fill_(mask, 0.0)


def _wide_tensors(model: nn.Module) -> list[Tensor]:
    tensors = named_tensors(model).values()
    wide = (t for t in tensors if t.dtype in _WIDE and t.layout == torch.strided)
    return [t for t in wide if not t.is_meta and t.numel()]


def _has_denormals(tensors: Sequence[Tensor]) -> bool:
    """Tell whether any number is denormal."""
    return any(map(_chunk_has_denormals, _chunks(tensors)))


def _chunk_has_denormals(chunk: Tensor) -> bool:
    sizes = chunk.abs()
    tiny = torch.finfo(chunk.dtype).tiny
    return float(sizes.amin()) < tiny and bool(_denormal_mask(chunk).any())


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all numbers in chunks: large tensors are split, small ones joined."""
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
        if flat.numel() < _CHUNK:
            small.setdefault((flat.dtype, flat.device), []).append(flat)
        else:
            yield from flat.split(_CHUNK)
    for group in small.values():
        yield from torch.cat(group).split(_CHUNK)


def _denormal_mask(tensor: Tensor) -> Tensor:
    size = tensor.abs()
    return (size > 0) & (size < torch.finfo(tensor.dtype).tiny)
