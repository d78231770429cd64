"""What blocks are made of: layers by dimension, norms and activations by name, chains of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .describe import BLOCKS, B, Entry

CONV: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, type[nn.Module]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}
BATCH: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE: dict[int, type[nn.Module]] = {
    1: nn.InstanceNorm1d,
    2: nn.InstanceNorm2d,
    3: nn.InstanceNorm3d,
}
MAXPOOL: dict[int, type[nn.Module]] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVGPOOL: dict[int, type[nn.Module]] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
TO_AVG: dict[int, type[nn.Module]] = {
    1: nn.AdaptiveAvgPool1d,
    2: nn.AdaptiveAvgPool2d,
    3: nn.AdaptiveAvgPool3d,
}
TO_MAX: dict[int, type[nn.Module]] = {
    1: nn.AdaptiveMaxPool1d,
    2: nn.AdaptiveMaxPool2d,
    3: nn.AdaptiveMaxPool3d,
}
POOL_TO: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
Shape = tuple[int, ...]


def conv(
    shape: Shape, before: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Module:
    """Same-padded convolution of the shape's dimension."""
    result = CONV[len(shape) - 1]
    return result(before, after, kernel, stride, kernel // 2, groups=groups)


def norm_layer(shape: Shape, channels: int, kind: str = "batch") -> nn.Module:
    """Norm of the shape's dimension that treats each channel on its own."""
    dims = len(shape) - 1
    if kind == "none":
        return nn.Identity()
    if kind == "instance":
        return INSTANCE[dims](channels, affine=True)
    return BATCH[dims](channels, affine=kind != "batch_plain")


def activation(name: str, channels: int = 1) -> nn.Module:
    """Activation by name; PReLU learns one slope a channel."""
    result: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU,
        "none": nn.Identity,
        "gelu": nn.GELU,
        "silu": nn.SiLU,
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "hardswish": nn.Hardswish,
        "leaky": lambda: nn.LeakyReLU(0.1),
        "prelu": lambda: nn.PReLU(channels),
        "softplus": nn.Softplus,
        "relu_inplace": lambda: nn.ReLU(inplace=True),
    }
    return result[name]()


def unit(
    shape: Shape,
    before: int,
    after: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    act: str = "relu",
    kind: str = "batch",
) -> nn.Sequential:
    """Convolution, norm, activation."""
    return nn.Sequential(
        conv(shape, before, after, kernel, stride, groups),
        norm_layer(shape, after, kind),
        activation(act, after),
    )


def fit(shape: Shape, multiple: int) -> tuple[nn.Module, int]:
    """A 1×1 convolution to the next multiple of channels, or nothing where it already is one."""
    channels = math.ceil(shape[0] / multiple) * multiple
    if channels == shape[0]:
        return nn.Identity(), channels
    return conv(shape, shape[0], channels, 1), channels


def halving(shape: Shape) -> int:
    """Stride 2 while the image is large enough, else 1."""
    return 2 if min(shape[1:]) >= 4 else 1


def chain(shape: Shape, blocks: Sequence[B]) -> tuple[nn.Sequential, Shape]:
    """Blocks one after another, and the shape that comes out."""
    result = nn.Sequential()
    for item in blocks:
        entry = BLOCKS[item.name]
        module = make(entry, shape, item)
        result.append(module)
        shape = shape_after(module, shape)
    return result, shape


def make(entry: Entry, shape: Shape, item: B) -> nn.Module:
    """The module one block of a description stands for."""
    plain = {option: values[0] for option, values in entry.options.items()}
    if entry.nests:
        plain["body"] = (B("conv"),)
    return entry.make(shape, **plain | dict(item.options))


@torch.no_grad()
def shape_after(module: nn.Module, shape: Shape) -> Shape:
    """The shape that comes out of a module, batch left out."""
    module.eval()
    return tuple(module(torch.zeros(2, *shape)).shape[1:])
