"""Find the layers whose weights can be solved for, in execution order, and where their outputs go.

A layer's output may pass through a batch norm, be scattered into a residual stream's channels, and
be added to the stream. If nothing else uses the output, the target is the sum, so that the layer
also corrects errors that the stream has from earlier layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fpgm.tracing.ops.registry import tensors
from fpgm.tracing.residual import PLAIN as PLAIN_CONVOLUTIONS
from fpgm.utils.example_inputs import Example
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import module_at, modules_by_path

PLAIN_FORWARDS = {nn.Linear.forward, *PLAIN_CONVOLUTIONS}
"""Forwards of layers that multiply by their weights and do nothing else."""


@dataclass(frozen=True)
class ResidualAddition:
    """An addition of two activations that a layer's output goes into."""

    number: int
    """Counted over all additions of a forward pass."""
    operand: int
    """Which of the two operands the layer's output is."""
    channels: tuple[int, ...] | None = None
    """Channels of the sum that the output is scattered to; None: all, in order."""
    dim: int = 1
    """Dimension of the channels."""


@dataclass(frozen=True)
class SolvableLayer:
    """A layer by path, how often it runs, its batch norm, and the addition its output goes into."""

    path: str
    calls: int = 1
    batch_norm: str | None = None
    """Path of the batch norm that is the only user of the layer's output."""
    addition: ResidualAddition | None = None


def is_addition(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Tell whether an operator adds two tensors that can be activations.

    Shapes are not compared here: additions are identified by their number in a pass, which must not
    depend on the batch size.
    """
    return (
        func._schema.name in ("aten::add", "aten::add_")
        and len(args) > 1
        and isinstance(args[0], Tensor)
        and isinstance(args[1], Tensor)
        and args[0].ndim > 1
        and args[1].ndim > 1
        and (kwargs or {}).get("alpha", 1) == 1
    )


@dataclass(frozen=True)
class SolvableLayers:
    """A model's solvable layers in the order to solve them, and what else the pass showed."""

    layers: list[SolvableLayer]
    additions: int
    """How many additions of activations there are."""
    largest_bytes: int
    """Input and output of the layer for which they are largest."""


def find_solvable_layers(model: nn.Module, example: Example) -> SolvableLayers:
    """Run the model once and follow the outputs of its layers."""
    tracer = _OutputTracer(model)
    tracer.run(example)
    return SolvableLayers(tracer.layers(), tracer.additions, tracer.largest_bytes)


def is_solvable(module: nn.Module) -> bool:
    """Tell whether a layer computes with its own weights only, and they can be replaced."""
    return (
        isinstance(module, nn.Linear | _ConvNd)
        and type(module).forward in PLAIN_FORWARDS
        and "forward" not in vars(module)
        and not is_parametrized(module)
        and isinstance(module._parameters.get("weight"), nn.Parameter)
    )


@dataclass(frozen=True)
class _LayerOutput:
    """Where a tensor comes from: a layer's output, after a batch norm, scattered to channels."""

    path: str
    batch_norm: str | None = None
    channels: tuple[int, ...] | None = None
    dim: int = 1


class _OutputTracer(TorchDispatchMode):
    """Follows layers' outputs until they are mixed with something else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self._events: list[str | int] = []
        """Paths of layers at their last call, and numbers of additions, in order."""
        self.additions = self.largest_bytes = 0
        self._calls: Counter[str] = Counter()
        self._outputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._uses: Counter[_LayerOutput] = Counter()
        self._batch_norms: dict[str, str] = {}
        self._layers_before: Counter[str] = Counter()
        self._added: dict[str, tuple[ResidualAddition, _LayerOutput]] = {}

    def layers(self) -> list[SolvableLayer]:
        """Return the layers, each at the point where its target is known: its call or its sum."""
        layers = [self._describe(event) for event in self._events if isinstance(event, str)]
        by_addition: dict[int, list[SolvableLayer]] = {}
        for layer in layers:
            if layer.addition is not None:
                by_addition.setdefault(layer.addition.number, []).append(layer)
        by_path = {layer.path: layer for layer in layers if layer.addition is None}
        order: list[SolvableLayer] = []
        for event in self._events:
            if isinstance(event, int):
                order += by_addition.get(event, [])
            elif event in by_path:
                order.append(by_path[event])
        return order

    def _describe(self, path: str) -> SolvableLayer:
        """Collect what the pass showed about a layer."""
        layer = SolvableLayer(path, self._calls[path])
        if layer.calls > 1 or self._uses[_LayerOutput(path)] != 1:
            return layer
        norm = self._batch_norms.get(path)
        if norm is not None and self._layers_before[norm] > 1:
            return layer  # a change of the norm for one layer would change the other's output
        layer = replace(layer, batch_norm=norm)
        if path in self._added:
            addition, output = self._added[path]
            steps = {_LayerOutput(path, norm), output}
            if output.batch_norm == norm and all(self._uses[step] == 1 for step in steps):
                layer = replace(layer, addition=addition)
        return layer

    def run(self, example: Example) -> None:
        """Run one forward pass."""
        shared = Counter(id(p) for m in self.model.modules() for p in m._parameters.values())
        with temporary_hooks() as handles:
            for path, module in modules_by_path(self.model).items():
                if is_solvable(module) and shared[id(module.weight)] == 1:
                    hook = self._layer_hook(path)
                elif isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
                    hook = self._norm_hook(path)
                else:
                    continue
                handles.append(module.register_forward_hook(hook, prepend=True))
            with torch.no_grad(), self:
                example.call(self.model)

    def _layer_hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            size = sum(t.nbytes for t in tensors((*args, out)))
            self.largest_bytes = max(self.largest_bytes, size)
            if self._calls[path]:
                self._events.remove(path)
            self._events.append(path)
            self._calls[path] += 1
            self._outputs[out] = _LayerOutput(path)

        return hook

    def _norm_hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            output = self._outputs.get(args[0]) if args else None
            tokens = output is not None and args[0].ndim > 2 and self._is_linear(output.path)
            if output is not None and output == _LayerOutput(output.path) and not tokens:
                self._layers_before[path] += 1
                self._batch_norms[output.path] = path
                self._outputs[out] = replace(output, batch_norm=path)

        return hook

    def _is_linear(self, path: str) -> bool:
        """Tell whether channels are the output's last dim, which is not a batch norm's."""
        return isinstance(module_at(self.model, path), nn.Linear)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = list(tensors((*args, *(kwargs or {}).values())))
        outputs = [self._outputs.get(x) for x in inputs]
        for output in outputs:
            if output is not None and not func._schema.name.startswith("aten::new_"):
                self._uses[output] += 1
        adds = is_addition(func, args, kwargs)
        out = func(*args, **(kwargs or {}))
        if adds:
            for operand, output in enumerate(outputs[:2]):
                if output is not None and args[0].shape == args[1].shape:
                    addition = ResidualAddition(
                        self.additions, operand, output.channels, output.dim
                    )
                    self._added.setdefault(output.path, (addition, output))
            self._events.append(self.additions)
            self.additions += 1
        elif func._schema.name in ("aten::index_copy", "aten::index_copy_"):
            output = self._outputs.get(args[3])
            if output is not None:
                channels = tuple(args[2].tolist())
                self._outputs[out] = replace(output, channels=channels, dim=args[1])
        return out
