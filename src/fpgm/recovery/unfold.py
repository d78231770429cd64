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
        self.windows = (
            _windows(layer, x, out) if arguments is None else _windows_of(x, layer, arguments)
        )
        sizes = [out.shape[0], *out.shape[2:]] if isinstance(layer, _ConvNd) else out.shape[:-1]
        self.index = _sample_positions(sizes, max_positions, seed)

    @property
    def images(self) -> Tensor:
        """Index in the batch of the input that each position belongs to."""
        return self.index[0]

    def rows(self) -> Tensor:
        """Return the layer's input at these positions: [groups, positions, fan-in]."""
        return self.by_group(_take_positions(self.windows, self.index).flatten(1))

    def take(self, out: Tensor) -> Tensor:
        """Return an output at these positions: [positions, channels]."""
        last = isinstance(self.layer, nn.Linear)
        return _take_positions(out.movedim(-1, 1) if last else out, self.index)

    def by_group(self, values: Tensor) -> Tensor:
        """Split the channels of values at these positions: [groups, positions, channels]."""
        by_group: Tensor = values.unflatten(1, (groups_of(self.layer), -1))
        return by_group.transpose(0, 1)


def _windows(layer: LinearOrConv, x: Tensor, out: Tensor) -> Tensor:
    """View the input as the windows a layer multiplies: [batch, channels, positions…, kernel…]."""
    if isinstance(layer, nn.Linear):
        return x.movedim(-1, 1)
    stride: Sequence[int] = layer.stride
    if isinstance(layer, _ConvTransposeNd):
        x, stride = _upsample_with_zeros(layer, x, out), [1] * len(layer.stride)
    else:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    return _unfold(x, layer, stride, layer.dilation)


def _windows_of(x: Tensor, layer: LinearOrConv, arguments: ConvArguments) -> Tensor:
    """View the input of a convolution with these arguments as windows."""
    padding = [width for width in reversed(arguments.padding) for _ in range(2)]
    return _unfold(F.pad(x, padding), layer, arguments.stride, arguments.dilation)


def _unfold(
    x: Tensor, layer: LinearOrConv, stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    assert isinstance(layer, _ConvNd)
    for i, kernel in enumerate(layer.kernel_size):
        reach = (kernel - 1) * dilation[i] + 1
        x = x.unfold(2 + i, reach, stride[i])[..., :: dilation[i]]
    return x


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


def _sample_positions(sizes: Sequence[int], max_positions: int, seed: int) -> tuple[Tensor, ...]:
    """Choose positions in an array of these sizes, all of them or a random subset."""
    count = torch.Size(sizes).numel()
    chosen = torch.arange(count)
    if count > max_positions:
        random = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(count, generator=random)[:max_positions]
    return torch.unravel_index(chosen, tuple(sizes))


def _take_positions(x: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    """Index [batch, channels, positions…, rest…] to [sampled positions, channels, rest…]."""
    first, *others = (i.to(x.device) for i in index)
    places: tuple[Any, ...] = (first, slice(None), *others)
    return x[places]


def _spatial_dims(weight: Tensor) -> tuple[int, ...]:
    return tuple(range(2, weight.ndim))
