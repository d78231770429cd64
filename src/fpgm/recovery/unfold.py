"""Write layers as matrices and their inputs as rows, so that output = rows @ matrix.

Convolutions of any dimension, stride, padding, dilation and groups, transposed convolutions, and
linear layers all become the same least-squares problem this way, with one matrix per group. Two
sizes recur: the fan-in (inputs of one output value: in_channels / groups × kernel size), and the
number of output channels of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

LinearOrConv = nn.Linear | _ConvNd


@dataclass(frozen=True)
class ConvArguments:
    """What a layer's own forward passes to the convolution, such as after padding the input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


def groups_of(layer: LinearOrConv) -> int:
    """Return the number of groups of a layer; 1 for linear layers."""
    return 1 if isinstance(layer, nn.Linear) else layer.groups


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the input among the arguments of a layer's call, given by position or by name."""
    x: Tensor = args[0] if args else kwargs["input"]
    return x


def matrix_of(layer: LinearOrConv) -> Tensor:
    """Return the weights as [groups, fan-in, output channels of a group].

    >>> matrix_of(nn.Conv2d(4, 6, 3, groups=2)).shape
    torch.Size([2, 18, 3])
    >>> matrix_of(nn.ConvTranspose1d(4, 6, 5)).shape
    torch.Size([1, 20, 6])
    """
    weight: Tensor = layer.weight.detach()
    groups = groups_of(layer)
    if isinstance(layer, _ConvTransposeNd):
        # A convolution of the zero-upsampled input with the flipped kernel.
        parts: Tensor = weight.flip(_spatial_dims(weight)).unflatten(0, (groups, -1)).flatten(3)
        return parts.transpose(2, 3).flatten(1, 2)
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)


@torch.no_grad()
def set_matrix_(layer: LinearOrConv, matrix: Tensor) -> None:
    """Set a layer's weights from a matrix as `matrix_of` returns it."""
    weight, groups = layer.weight, groups_of(layer)
    if isinstance(layer, _ConvTransposeNd):
        parts = matrix.unflatten(1, (weight.shape[0] // groups, -1)).transpose(2, 3)
        weight.copy_(parts.reshape(weight.shape).flip(_spatial_dims(weight)))
    else:
        weight.copy_(matrix.transpose(1, 2).reshape(weight.shape))


class OutputSample:
    """A random sample of output positions of a layer, with the input rows behind them."""

    def __init__(
        self,
        layer: LinearOrConv,
        x: Tensor,
        out: Tensor,
        max_positions: int,
        seed: int,
        arguments: ConvArguments | None = None,
    ) -> None:
        """Sample output positions.

        Args:
            layer: the layer.
            x: what it multiplies by its weights.
            out: its output.
            max_positions: at most so many are sampled.
            seed: decides which.
            arguments: of the convolution, if they are not the layer's attributes.
        """
        self.layer = layer
        self._windows = None
        if isinstance(layer, _ConvNd):
            self._windows = _Windows(layer, x, out, arguments)
        self._x = x
        sizes = out.shape[:-1] if self._windows is None else [len(out), *out.shape[2:]]
        positions = torch.Size(sizes[1:]).numel()
        flat = _sample_positions(sizes[0] * positions, max_positions, seed).to(x.device)
        self.images, self._places = flat // positions, flat % positions
        """Index in the batch of the input that each position belongs to; its place in there."""

    def rows(self, chosen: Tensor | None = None) -> Tensor:
        """Return the layer's input at these positions: [groups, positions, fan-in].

        Args:
            chosen: a mask, if only some positions are wanted; their order must stay.
        """
        images, places = self.images, self._places
        if chosen is not None:
            images, places = images[chosen], places[chosen]
        if self._windows is None:
            return self.by_group(_take_rows(self._x, images, places))
        x = self._windows.x.flatten(2)
        columns = _take_columns(x, images, self._windows.indices(places)).flatten(0, 1)
        by_group: Tensor = columns.unflatten(0, (groups_of(self.layer), -1))
        return by_group.mT

    def take(self, out: Tensor) -> Tensor:
        """Return an output at these positions: [positions, channels]."""
        if self._windows is None:
            return _take_rows(out, self.images, self._places)
        return _take_columns(out.flatten(2), self.images, self._places[None])[:, 0].T

    def by_group(self, values: Tensor) -> Tensor:
        """Split the channels of values at these positions: [groups, positions, channels]."""
        by_group: Tensor = values.unflatten(1, (groups_of(self.layer), -1))
        return by_group.transpose(0, 1)


class _Windows:
    """A padded input, and where in it a convolution reads for each output position."""

    def __init__(
        self, layer: _ConvNd, x: Tensor, out: Tensor, arguments: ConvArguments | None
    ) -> None:
        self.kernel, self.out_sizes = layer.kernel_size, out.shape[2:]
        self.stride: Sequence[int] = layer.stride
        self.dilation: Sequence[int] = layer.dilation
        if arguments is not None:
            padding = [width for width in reversed(arguments.padding) for _ in range(2)]
            self.x = F.pad(x, padding)
            self.stride, self.dilation = arguments.stride, arguments.dilation
        elif isinstance(layer, _ConvTransposeNd):
            self.x, self.stride = _upsample_with_zeros(layer, x, out), [1] * len(layer.stride)
        else:
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            self.x = F.pad(x, layer._reversed_padding_repeated_twice, mode)

    def indices(self, places: Tensor) -> Tensor:
        """Return where in the flattened x each output place reads: [kernel positions, places]."""
        index = places.new_zeros(1, len(places))
        at = torch.unravel_index(places, tuple(self.out_sizes))
        for dim, size in enumerate(self.x.shape[2:]):
            offsets = torch.arange(self.kernel[dim], device=places.device) * self.dilation[dim]
            along = at[dim] * self.stride[dim] + offsets[:, None]
            index = (index[:, None] * size + along).flatten(0, 1)
        return index


def _upsample_with_zeros(layer: _ConvTransposeNd, x: Tensor, out: Tensor) -> Tensor:
    """Put zeros between and around a transposed convolution's inputs, as far as it reads them."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], layer.stride, strict=True)]
    wide = x.new_zeros([*x.shape[:2], *sizes])
    steps: tuple[Any, ...] = tuple(slice(None, None, s) for s in layer.stride)
    index: tuple[Any, ...] = (slice(None), slice(None), *steps)
    wide[index] = x
    pads = []
    for i, size in enumerate(sizes):
        reach = layer.dilation[i] * (layer.kernel_size[i] - 1)
        before = reach - int(layer.padding[i])
        pads.append((before, out.shape[2 + i] + reach - before - size))
    return F.pad(wide, [pad for ends in reversed(pads) for pad in ends])


def _sample_positions(count: int, max_positions: int, seed: int) -> Tensor:
    """Choose positions, all of them or a random subset, in ascending order."""
    if count <= max_positions:
        return torch.arange(count)
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=random)[:max_positions].sort().values


def _take_rows(x: Tensor, images: Tensor, places: Tensor) -> Tensor:
    """Index [batch, positions…, channels] to [samples, channels]."""
    rows = x.flatten(1, -2) if x.ndim > 2 else x[:, None]
    return rows[images.to(x.device), places.to(x.device)]


def _take_columns(x: Tensor, images: Tensor, columns: Tensor) -> Tensor:
    """Index [batch, channels, positions] to [channels, kernel positions, samples].

    One image at a time, which fits into the processor's cache.

    Args:
        x: the batch.
        images: in which image each sample is, in ascending order.
        columns: the positions to take for each sample: [kernel positions, samples].
    """
    columns = columns.to(x.device)
    counts = torch.bincount(images, minlength=len(x)).tolist()
    parts = [
        image.index_select(1, part.reshape(-1)).unflatten(1, part.shape)
        for image, part in zip(x, columns.split(counts, 1), strict=True)
        if part.numel()
    ]
    return torch.cat(parts, 2) if parts else x.new_zeros(x.shape[1], *columns.shape)


def _spatial_dims(weight: Tensor) -> tuple[int, ...]:
    return tuple(range(2, weight.ndim))
