"""Low-rank factorization: split layers into two smaller ones where that has fewer weights.

A layer with weight W becomes one with fewer filters, followed by a 1×1 layer that mixes them; the
pair comes from the singular value decomposition of W. The paper names it as a next step after
pruning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fpgm.errors import RequestError
from fpgm.recovery.solvable_layers import is_solvable
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import modules_by_path, replace_module_

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

MAX_WEIGHT_RATIO = 0.9
"""A layer is split only if the pair has less than this fraction of its weights."""


@dataclass(frozen=True)
class LayerSplit:
    """A layer that was split: its new rank, and the resulting error."""

    layer: str
    rank: int
    full: int
    error: float
    """Squared error of the weights, relative to their squares."""
    weights: float
    """Weights of the pair, as a fraction of the layer's."""


@torch.no_grad()
def split_layers(
    model: nn.Module, example: Example, *, error: float
) -> tuple[nn.Module, list[LayerSplit]]:
    """Return a copy whose layers are split where that saves weights, and the splits.

    The model is unchanged. Layers that the example does not run, that have hooks or that are
    subclasses are not split. The rank of every layer is the smallest with which the squared error
    of its weights is at most the fraction `error` of their squares.

    >>> net = nn.Sequential(nn.Conv2d(8, 32, 3))
    >>> net[0].weight.data[4:] = net[0].weight.data[:4].repeat(7, 1, 1, 1)   # rank 4
    >>> small, (split,) = split_layers(net, Example((torch.zeros(1, 8, 8, 8),), {}), error=0.001)
    >>> split.rank, split.full
    (4, 32)
    """
    small = copy_model(model)
    modules = modules_by_path(small)
    splits = []
    for path in dict.fromkeys(call.path for call in called_layers(small, example)):
        module = modules[path]
        factors = _factorize(module, error) if path and _can_split(module) else None
        if factors is not None:
            pair, rank, weight_error, ratio = factors
            replace_module_(small, module, pair.train(module.training))
            full_rank = min(_weight_matrix(module).shape)
            splits.append(LayerSplit(path, rank, full_rank, weight_error, ratio))
    if not splits:
        raise RequestError(
            f"low_rank is {error:g}: splitting a layer with so small an error saves no weights. "
            "Give a larger error, or export without low_rank."
        )
    return small, splits


def _can_split(module: nn.Module) -> bool:
    """Tell whether a layer only multiplies by its weights, and has no hooks."""
    return (
        type(module) in _KINDS
        and getattr(module, "groups", 1) == 1
        and is_solvable(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def _factorize(module: nn.Module, error: float) -> tuple[nn.Sequential, int, float, float] | None:
    """Return the pair, its rank, weight error and ratio of weights; None if it saves too little."""
    matrix = _weight_matrix(module)
    left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    energy = singular.square()
    total = float(energy.sum())
    if not total:
        return None
    errors = 1 - energy.cumsum(0) / total  # of rank 1, 2, …
    rank = int((errors > error).sum()) + 1
    ratio = rank * sum(matrix.shape) / matrix.numel()
    if rank > len(singular) or ratio >= MAX_WEIGHT_RATIO:
        return None
    root = singular[:rank].sqrt()
    first, second = _build_pair(module, rank)
    _set_weight_(first, root[:, None] * right[:rank])
    _set_weight_(second, left[:, :rank] * root)
    return nn.Sequential(first, second), rank, max(0.0, float(errors[rank - 1])), ratio


def _build_pair(module: nn.Module, rank: int) -> tuple[nn.Module, nn.Module]:
    """Build two layers: the first like the given one with `rank` filters, the second mixes them."""
    like = next(module.parameters())
    options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    bias = module.bias is not None
    second: nn.Module
    if isinstance(module, nn.Linear):
        first: nn.Module = nn.Linear(module.in_features, rank, bias=False, **options)
        second = nn.Linear(rank, module.out_features, bias=bias, **options)
    else:
        assert isinstance(module, _ConvNd)
        kind: Any = type(module)
        first = kind(
            module.in_channels, rank, module.kernel_size, module.stride, module.padding,
            module.dilation, bias=False, padding_mode=module.padding_mode, **options,
        )  # fmt: skip
        second = kind(rank, module.out_channels, 1, bias=bias, **options)
    if isinstance(module.bias, Tensor):
        assert isinstance(second.bias, Tensor)
        second.bias.copy_(module.bias)
    return first, second


def _weight_matrix(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.flatten(1)


def _set_weight_(module: nn.Module, values: Tensor) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    weight.copy_(values.reshape(weight.shape))
