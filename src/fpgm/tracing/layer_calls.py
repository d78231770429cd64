"""The layers a runtime spends its time in: convolutions and linear layers, as sizes only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.utils.example_inputs import Example
from fpgm.utils.locking import TURN, in_turn
from fpgm.utils.modules import modules_by_path
from fpgm.utils.preserve_state import undisturbed

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layer:
    """A convolution, transposed convolution or linear layer, and the input it gets."""

    kind: str
    batch: int
    """Rows of a linear layer."""
    space: tuple[int, ...]
    reads: int
    writes: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    bias: bool = True
    border: str = "zeros"
    """How a convolution goes on beyond the edges."""
    dtype: torch.dtype = torch.float32

    @property
    def depthwise(self) -> bool:
        """Whether every channel is filtered by itself."""
        return self.groups > 1 and self.groups == self.reads == self.writes

    def sized(self, reads: int, writes: int) -> Layer:
        """The same with other widths; a depthwise one has as many groups as channels."""
        groups = writes if self.depthwise else self.groups
        return replace(self, reads=reads, writes=writes, groups=groups)

    def module(self) -> nn.Module:
        """As torch has it, with random weights; the caller's random numbers stay as they are."""
        with TURN, torch.random.fork_rng(devices=[]):
            return self._module().to(self.dtype).eval()

    def _module(self) -> nn.Module:
        if self.kind == "linear":
            return nn.Linear(self.reads, self.writes, self.bias)
        options: dict[str, Any] = {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "bias": self.bias,
            "padding_mode": self.border,
        }
        if self.kind == "transposed":
            options["output_padding"] = self.output_padding
        table: tuple[Any, ...] = _TRANSPOSED if self.kind == "transposed" else _CONVS
        made: nn.Module = table[len(self.space) - 1](
            self.reads, self.writes, self.kernel, **options
        )
        return made

    def input(self) -> Tensor:
        """Noise of the right shape."""
        shape = (self.batch, self.reads, *self.space)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.dtype)

    def key(self) -> str:
        """A name under which its time can be kept."""
        values = (
            self.kind, self.batch, self.space, self.reads, self.writes, self.kernel, self.stride,
            self.padding, self.dilation, self.output_padding, self.groups, int(self.bias),
            self.border, str(self.dtype).removeprefix("torch."),
        )  # fmt: skip
        return " ".join(_text(value) for value in values)


@dataclass(frozen=True)
class Called:
    """A layer of a model, by its path, and how much it gave out."""

    path: str
    layer: Layer
    given: int
    """Numbers in its output."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the call."""
        layer = self.layer
        if layer.kind == "transposed":  # every number it reads goes into some it gives out
            times, across = layer.batch * layer.reads * math.prod(layer.space), layer.writes
        else:
            times, across = self.given, layer.reads
        return times * (across // layer.groups) * math.prod(layer.kernel)


@in_turn
@torch.no_grad()
def called_layers(model: nn.Module, example: Example) -> list[Called]:
    """Every call of a convolution or linear layer while the model runs once, in order."""
    found: list[Called] = []
    handles = []

    def hook_of(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
                found.extend(_called(path, module, args[0], out))

        return hook

    for path, module in modules_by_path(model).items():
        if isinstance(module, (*_CONVS, *_TRANSPOSED, nn.Linear)):
            handles.append(module.register_forward_hook(hook_of(path)))
    try:
        with undisturbed(model):
            model.eval()
            example.call(model)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _called(path: str, module: nn.Module, x: Tensor, out: Tensor) -> Iterator[Called]:
    if isinstance(module, nn.Linear):
        layer = Layer(
            "linear", x.numel() // x.shape[-1], (), module.in_features, module.out_features,
            bias=module.bias is not None, dtype=x.dtype,
        )  # fmt: skip
        yield Called(path, layer, out.numel())
    elif isinstance(module, (*_CONVS, *_TRANSPOSED)) and x.ndim == len(module.kernel_size) + 2:
        transposed = isinstance(module, _TRANSPOSED)
        layer = Layer(
            "transposed" if transposed else "conv",
            x.shape[0],
            tuple(x.shape[2:]),
            x.shape[1],
            module.out_channels,
            tuple(module.kernel_size),
            tuple(module.stride),
            module.padding if isinstance(module.padding, str) else tuple(module.padding),
            tuple(module.dilation),
            tuple(module.output_padding) if transposed else (),
            module.groups,
            module.bias is not None,
            module.padding_mode,
            x.dtype,
        )
        yield Called(path, layer, out.numel())


def _text(value: object) -> str:
    return "x".join(map(str, value)) or "-" if isinstance(value, tuple) else str(value)
