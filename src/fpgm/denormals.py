"""Numbers too small to be normal: they change nothing, and processors are slow with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fpgm.tensors import named_tensors

_WIDE = (torch.float32, torch.float64, torch.bfloat16)
"""In these they are below 1e-37; in float16 they are numbers like others."""


@torch.no_grad()
def count_denormals(model: nn.Module) -> int:
    """How many weights there are of the kind."""
    return sum(int(_tiny(t).sum()) for t in _wide(model))


@torch.no_grad()
def flush_denormals_(model: nn.Module) -> None:
    """Set them to zero."""
    for tensor in _wide(model):
        if bool((found := _tiny(tensor)).any()):
            tensor.masked_fill_(found, 0.0)


def _wide(model: nn.Module) -> list[Tensor]:
    return [t for t in named_tensors(model).values() if t.dtype in _WIDE and not t.is_meta]


def _tiny(tensor: Tensor) -> Tensor:
    size = tensor.abs()
    return (size > 0) & (size < torch.finfo(tensor.dtype).tiny)
