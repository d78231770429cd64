"""The layers a runtime spends its time in: convolutions and linear layers, as sizes only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.utils.example_inputs import Example
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import modules_by_path
from fpgm.utils.preserve_state import preserve_state
from fpgm.utils.thread_lock import GLOBAL_LOCK, with_global_lock

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class LayerSpec:
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
    """Padding mode."""
    dtype: torch.dtype = torch.float32

    @property
    def depthwise(self) -> bool:
        """Tell whether every channel is filtered by itself."""
        return self.groups > 1 and self.groups == self.reads == self.writes

    def with_widths(self, reads: int, writes: int) -> LayerSpec:
        """Return the layer with other widths; a depthwise one has as many groups as channels."""
        groups = writes if self.depthwise else self.groups
        return replace(self, reads=reads, writes=writes, groups=groups)

    def module(self) -> nn.Module:
        """Build the torch layer with random weights; the caller's random state is preserved."""
        with GLOBAL_LOCK, torch.random.fork_rng(devices=[]):
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
        module: nn.Module = table[len(self.space) - 1](
            self.reads, self.writes, self.kernel, **options
        )
        return module

    def input(self) -> Tensor:
        """Return noise in the shape of the input."""
        shape = (self.batch, self.reads, *self.space)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.dtype)

    def key(self) -> str:
        """Return the key under which its time is stored."""
        values = (
            self.kind, self.batch, self.space, self.reads, self.writes, self.kernel, self.stride,
            self.padding, self.dilation, self.output_padding, self.groups, int(self.bias),
            self.border, str(self.dtype).removeprefix("torch."),
        )  # fmt: skip
        return " ".join(_text(value) for value in values)


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer, by its path, and the size of its output."""

    path: str
    layer: LayerSpec
    given: int
    """Number of elements of its output."""

    @property
    def macs(self) -> int:
        """Count the multiply-accumulates of the call."""
        layer = self.layer
        if layer.kind == "transposed":  # every input element contributes to several outputs
            times, across = layer.batch * layer.reads * math.prod(layer.space), layer.writes
        else:
            times, across = self.given, layer.reads
        return times * (across // layer.groups) * math.prod(layer.kernel)


@with_global_lock
@torch.no_grad()
def called_layers(model: nn.Module, example: Example) -> list[LayerCall]:
    """List every call of a convolution or linear layer in one run of the model, in order."""
    calls: list[LayerCall] = []

    def hook_of(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
                calls.extend(_layer_call(path, module, args[0], out))

        return hook

    with temporary_hooks() as handles:
        for path, module in modules_by_path(model).items():
            if isinstance(module, (*_CONVS, *_TRANSPOSED, nn.Linear)):
                handles.append(module.register_forward_hook(hook_of(path)))
        with preserve_state(model):
            model.eval()
            example.call(model)
    return calls


def _layer_call(path: str, module: nn.Module, x: Tensor, out: Tensor) -> Iterator[LayerCall]:
    if isinstance(module, nn.Linear):
        layer = LayerSpec(
            "linear", x.numel() // x.shape[-1], (), module.in_features, module.out_features,
            bias=module.bias is not None, dtype=x.dtype,
        )  # fmt: skip
        yield LayerCall(path, layer, out.numel())
    elif isinstance(module, (*_CONVS, *_TRANSPOSED)) and x.ndim == len(module.kernel_size) + 2:
        transposed = isinstance(module, _TRANSPOSED)
        layer = LayerSpec(
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
        yield LayerCall(path, layer, out.numel())


def _text(value: object) -> str:
    return "x".join(map(str, value)) or "-" if isinstance(value, tuple) else str(value)
