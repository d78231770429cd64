"""A layer as a matrix and its inputs as rows, so that its output is their product.

Convolutions of any dimension, stride, padding, dilation and groups, transposed ones, and linear
layers all become one least-squares problem here, one matrix a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

Layer = nn.Linear | _ConvNd


def groups_of(layer: Layer) -> int:
    """How many groups of channels a layer keeps apart."""
    return 1 if isinstance(layer, nn.Linear) else layer.groups


def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer reads, given by position or by name."""
    x: Tensor = args[0] if args else kwargs["input"]
    return x


def matrix_of(layer: Layer) -> Tensor:
    """Weights as [groups, reads, writes].

    >>> matrix_of(nn.Conv2d(4, 6, 3, groups=2)).shape
    torch.Size([2, 18, 3])
    >>> matrix_of(nn.ConvTranspose1d(4, 6, 5)).shape
    torch.Size([1, 20, 6])
    """
    weight: Tensor = layer.weight.detach()
    groups = groups_of(layer)
    if isinstance(layer, _ConvTransposeNd):
        # A convolution of the spread-out input with the kernel reversed.
        parts: Tensor = weight.flip(_spatial(weight)).unflatten(0, (groups, -1)).flatten(3)
        return parts.transpose(2, 3).flatten(1, 2)
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)


@torch.no_grad()
def set_matrix_(layer: Layer, matrix: Tensor) -> None:
    """Give a layer the weights of a matrix."""
    weight, groups = layer.weight, groups_of(layer)
    if isinstance(layer, _ConvTransposeNd):
        parts = matrix.unflatten(1, (weight.shape[0] // groups, -1)).transpose(2, 3)
        weight.copy_(parts.reshape(weight.shape).flip(_spatial(weight)))
    else:
        weight.copy_(matrix.transpose(1, 2).reshape(weight.shape))


class Sample:
    """Some positions of a layer's output: the rows it reads there, and the values it writes."""

    def __init__(self, layer: Layer, x: Tensor, out: Tensor, most: int, seed: int) -> None:
        """At most so many positions, drawn by seed."""
        self.layer = layer
        self.windows = _windows(layer, x, out)
        sizes = [out.shape[0], *out.shape[2:]] if isinstance(layer, _ConvNd) else out.shape[:-1]
        self.index = _positions(sizes, most, seed)

    @property
    def pictures(self) -> Tensor:
        """Which of the batch each position is in."""
        return self.index[0]

    def rows(self) -> Tensor:
        """What the layer reads: [groups, positions, reads]."""
        return self._grouped(_picked(self.windows, self.index).flatten(1))

    def values(self, out: Tensor) -> Tensor:
        """What stands at these positions: [groups, positions, writes]."""
        last = isinstance(self.layer, nn.Linear)
        return self._grouped(_picked(out.movedim(-1, 1) if last else out, self.index))

    def _grouped(self, found: Tensor) -> Tensor:
        apart: Tensor = found.unflatten(1, (groups_of(self.layer), -1))
        return apart.transpose(0, 1)


def _windows(layer: Layer, x: Tensor, out: Tensor) -> Tensor:
    """Every window of the input a layer looks at: [pictures, channels, positions…, kernel…]."""
    if isinstance(layer, nn.Linear):
        return x.movedim(-1, 1)
    stride: Sequence[int] = layer.stride
    if isinstance(layer, _ConvTransposeNd):
        x, stride = _spread(layer, x, out), [1] * len(layer.stride)
    else:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    for i, (kernel, dilation) in enumerate(zip(layer.kernel_size, layer.dilation, strict=True)):
        x = x.unfold(2 + i, (kernel - 1) * dilation + 1, stride[i])[..., ::dilation]
    return x


def _spread(layer: _ConvTransposeNd, x: Tensor, out: Tensor) -> Tensor:
    """A transposed convolution's input with zeros between and around, as wide as it is read."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], layer.stride, strict=True)]
    wide = x.new_zeros([*x.shape[:2], *sizes])
    steps: tuple[Any, ...] = tuple(slice(None, None, s) for s in layer.stride)
    everywhere: tuple[Any, ...] = (slice(None), slice(None), *steps)
    wide[everywhere] = x
    pads = []
    for i, size in enumerate(sizes):
        reach = layer.dilation[i] * (layer.kernel_size[i] - 1)
        before = reach - int(layer.padding[i])
        pads.append((before, out.shape[2 + i] + reach - before - size))
    return F.pad(wide, [pad for ends in reversed(pads) for pad in ends])


def _positions(sizes: Sequence[int], most: int, seed: int) -> tuple[Tensor, ...]:
    """Places in an array of these sizes, all of them or a random choice."""
    count = torch.Size(sizes).numel()
    chosen = torch.arange(count)
    if count > most:
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most]
    return torch.unravel_index(chosen, tuple(sizes))


def _picked(x: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    """[pictures, channels, positions…, rest…] at some positions: [positions, channels, rest…]."""
    first, *others = (i.to(x.device) for i in index)
    places: tuple[Any, ...] = (first, slice(None), *others)
    return x[places]


def _spatial(weight: Tensor) -> tuple[int, ...]:
    return tuple(range(2, weight.ndim))
