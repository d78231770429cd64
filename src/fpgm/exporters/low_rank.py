"""Low-rank layers: what pruning leaves, split in two where that is cheaper.

A layer with weight W becomes one with fewer filters followed by one that mixes them (1×1): the
best such pair by the singular values of W. The paper names it as what could follow pruning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fpgm.errors import RequestError
from fpgm.recovery.solvable_layers import solvable
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import modules_by_path, replace_module_

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

WORTH = 0.9
"""A pair is taken if it needs less than this share of the layer's weights."""


@dataclass(frozen=True)
class Split:
    """A layer in two: so many filters between them, and what that loses."""

    layer: str
    rank: int
    full: int
    error: float
    """Squared error of the weights, as a share of their squares."""
    weights: float
    """Share of the weights that is left."""


@torch.no_grad()
def split_layers(
    model: nn.Module, example: Example, *, error: float
) -> tuple[nn.Module, list[Split]]:
    """A copy whose layers are split in two wherever the weights' error stays below `error`.

    The model is untouched. Layers that the example does not run through, that hooks look at or that
    are subclasses stay whole. The rank of every layer is the smallest with which the squared error
    of its weights is at most that share of their squares.

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
        found = _split(module, error) if path and _can_split(module) else None
        if found is not None:
            pair, rank, lost, left = found
            replace_module_(small, module, pair.train(module.training))
            splits.append(Split(path, rank, min(_matrix(module).shape), lost, left))
    if not splits:
        raise RequestError(
            f"low_rank is {error:g}: no layer is cheaper in two with so small an error."
        )
    return small, splits


def _can_split(module: nn.Module) -> bool:
    """Whether a layer does what its weights say, and nothing else happens at it."""
    return (
        type(module) in _KINDS
        and getattr(module, "groups", 1) == 1
        and solvable(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def _split(module: nn.Module, error: float) -> tuple[nn.Sequential, int, float, float] | None:
    """The pair, its rank, the error of its weights, and the share of weights it needs."""
    matrix = _matrix(module)
    left, sizes, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    energy = sizes.square()
    whole = float(energy.sum())
    if not whole:
        return None
    lost = 1 - energy.cumsum(0) / whole  # with so many filters and one more
    rank = int((lost > error).sum()) + 1
    share = rank * sum(matrix.shape) / matrix.numel()
    if rank > len(sizes) or share >= WORTH:
        return None
    root = sizes[:rank].sqrt()
    first, second = _pair(module, rank)
    _fill_(first, root[:, None] * right[:rank])
    _fill_(second, left[:, :rank] * root)
    return nn.Sequential(first, second), rank, max(0.0, float(lost[rank - 1])), share


def _pair(module: nn.Module, rank: int) -> tuple[nn.Module, nn.Module]:
    """Two layers in place of one: the first is like it but narrow, the second mixes."""
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


def _matrix(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.flatten(1)


def _fill_(module: nn.Module, values: Tensor) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    weight.copy_(values.reshape(weight.shape))
