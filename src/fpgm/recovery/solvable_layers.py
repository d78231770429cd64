"""Find the layers whose weights can be solved for, in execution order, and where their outputs go.

A layer's output may pass through a batch norm, be scattered into a residual stream's channels, and
be added to the stream. If nothing else uses the output, the target is the sum, so that the layer
also corrects errors that the stream has from earlier layers. Layers that cannot be solved are
listed with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fpgm.recovery.activation_offload import storage_of
from fpgm.recovery.unfold import ConvArguments
from fpgm.tracing.ops.registry import name_of, tensors
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
    arguments: ConvArguments | None = None
    """What its own forward passes to the convolution; None: the layer's attributes."""


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
    unsolvable: dict[str, str]
    """Layers with weights of their own that cannot be solved, with the reason."""


def find_solvable_layers(model: nn.Module, example: Example) -> SolvableLayers:
    """Run the model once and follow the outputs of its layers."""
    tracer = _OutputTracer(model)
    tracer.run(example)
    layers = tracer.layers()
    solvable = {layer.path for layer in layers}
    unsolvable = {path: why for path, why in tracer.unsolvable.items() if path not in solvable}
    return SolvableLayers(layers, tracer.additions, tracer.largest_bytes, unsolvable)


def is_solvable(module: nn.Module) -> bool:
    """Tell whether a layer computes with its own weights only, and they can be replaced."""
    return is_plain(module) and _why_not_replaceable(module) is None


def is_plain(module: nn.Module) -> bool:
    """Tell whether a layer multiplies its input by its weights and does nothing else."""
    return type(module).forward in PLAIN_FORWARDS and "forward" not in vars(module)


def has_plain_forward(module: nn.Module) -> bool:
    """Tell whether a batch norm is torch's own, without an activation or the like."""
    return type(module).forward is _BatchNorm.forward and "forward" not in vars(module)


def _why_not_replaceable(module: nn.Module) -> str | None:
    """Say why a layer's weights cannot be replaced, if they cannot."""
    if is_parametrized(module) or not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weights are computed from other tensors"
    return None


def _why_no_rows(module: nn.Module, out: Tensor) -> str | None:
    """Say why a layer's call has no row for each input, if it has none."""
    if torch._C._functorch.is_functorch_wrapped_tensor(out):
        return "it is called inside of torch.func"
    dims = 2 + len(getattr(module, "kernel_size", ()))
    has_rows = out.ndim > 1 if isinstance(module, nn.Linear) else out.ndim == dims
    return None if has_rows else "it is called without a batch dimension"


def _conv_arguments(args: tuple[Any, ...]) -> ConvArguments | None:
    """Read the arguments of `aten::convolution`; None if it is transposed."""
    _, weight, _, stride, padding, dilation, transposed, *_ = args
    if transposed:
        return None
    dims = weight.ndim - 2
    sizes = [tuple(s) * (dims if len(s) == 1 else 1) for s in (stride, padding, dilation)]
    return ConvArguments(*sizes)


@dataclass(frozen=True)
class _LayerOutput:
    """Where a tensor comes from: a layer's output, after a batch norm, scattered to channels."""

    path: str
    batch_norm: str | None = None
    channels: tuple[int, ...] | None = None
    dim: int = 1


class ConvInputs(TorchDispatchMode):
    """Notes what the convolutions of layers with a forward of their own multiply."""

    def __init__(self, model: nn.Module, layers: Iterable[SolvableLayer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = [layer.path for layer in layers if layer.arguments is not None]
        self._paths = {id(module_at(model, path).weight): path for path in own}
        self._latest: dict[str, tuple[Any, ...]] = {}

    def take(self, path: str) -> tuple[Any, ...] | None:
        """Return the arguments of the convolution of the layer's latest call, once.

        None if its forward did without the convolution this time.
        """
        return self._latest.pop(path, None)

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note the arguments, if the operator is such a convolution."""
        path = self._paths.get(id(args[1])) if len(args) > 1 else None
        if path is not None and name_of(func) == "convolution":
            self._latest[path] = args

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.note(func, args)
        return func(*args, **(kwargs or {}))


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
        self._norm_uses: Counter[str] = Counter()
        self._added: dict[str, tuple[ResidualAddition, _LayerOutput]] = {}
        self.unsolvable: dict[str, str] = {}
        self._own_weights: dict[int, str] = {}
        """Paths of layers with a forward of their own, by the ids of their weights."""
        self._convolutions: dict[str, list[tuple[Tensor, ConvArguments | None]]] = {}
        """What such a layer's forward computed with its weight since it began; no arguments if this
        is not a convolution of the layer, or something was written into the result."""
        self._arguments: dict[str, ConvArguments] = {}
        self._norm_of: dict[int, str] = {}
        """Paths of batch norms, by the ids of their running means."""

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
        layer = SolvableLayer(path, self._calls[path], arguments=self._arguments.get(path))
        if layer.calls > 1 or self._uses[_LayerOutput(path)] != 1:
            return layer
        norm = self._batch_norms.get(path)
        if norm is not None and self._norm_uses[norm] > 1:
            return layer  # a change of the norm for this layer would change other activations
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
                if isinstance(module, _BatchNorm) and module.running_mean is not None:
                    self._norm_of[id(module.running_mean)] = path
                if not isinstance(module, nn.Linear | _ConvNd):
                    continue
                why = _why_not_replaceable(module)
                if why is None and shared[id(module.weight)] > 1:
                    why = "it shares its weights with another layer"
                hook = self._layer_hook(path, why)
                handles.append(module.register_forward_hook(hook, prepend=True))
                if why is None and not is_plain(module):
                    self._own_weights[id(module.weight)] = path
            with torch.no_grad(), self:
                example.call(self.model)

    def _layer_hook(self, path: str, why: str | None) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            reason = why or self._why_not_called_plainly(path, module, out)
            reason = reason or _why_no_rows(module, out)
            if reason is not None:
                self.unsolvable[path] = reason
                self._calls.pop(path, None)
                self._events = [event for event in self._events if event != path]
                return
            if path in self.unsolvable:
                return
            size = sum(t.nbytes for t in tensors((*args, out)))
            self.largest_bytes = max(self.largest_bytes, size)
            if self._calls[path]:
                self._events.remove(path)
            self._events.append(path)
            self._calls[path] += 1
            self._outputs[out] = _LayerOutput(path)

        return hook

    def _why_not_called_plainly(self, path: str, module: nn.Module, out: Any) -> str | None:
        """Say why a forward that is not torch's own is more than a convolution, if it is."""
        if is_plain(module):
            return None
        calls = self._convolutions.pop(path, [])
        if len(calls) != 1 or calls[0][0] is not out or calls[0][1] is None:
            return "its forward does not end in one convolution with its weights"
        if self._arguments.setdefault(path, calls[0][1]) != calls[0][1]:
            return "its forward convolves with other strides or paddings in each call"
        return None

    def _note_convolution(self, args: tuple[Any, ...], out: Tensor) -> None:
        path = self._own_weights.get(id(args[1]))
        if path is None:
            return
        layer, bias, groups = module_at(self.model, path), args[2], args[8]
        is_own = bias is layer.bias and groups == layer.groups
        arguments = _conv_arguments(args) if is_own else None
        self._convolutions.setdefault(path, []).append((out, arguments))

    def _note_write(self, inputs: Sequence[Tensor]) -> None:
        """Note that something may have been written into results of convolutions."""
        for calls in self._convolutions.values():
            for number, (out, _) in enumerate(calls):
                if any(x is out or _share_memory(x, out) for x in inputs):
                    calls[number] = out, None

    def _note_batch_norm(self, args: tuple[Any, ...], out: Tensor) -> None:
        """Note which layer's output a batch norm normalizes."""
        path = next((p for a in args[2:] if (p := self._norm_of.get(id(a))) is not None), None)
        if path is None:
            return
        self._norm_uses[path] += 1
        output = self._outputs.get(args[0])
        norm = module_at(self.model, path)
        own = [norm.weight, norm.bias, norm.running_mean, norm.running_var]
        if output is None or any(a is not b for a, b in zip(args[1:5], own, strict=True)):
            return
        tokens = args[0].ndim > 2 and self._is_linear(output.path)
        if output == _LayerOutput(output.path) and not tokens:
            self._batch_norms[output.path] = path
            self._outputs[out] = replace(output, batch_norm=path)

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
        name = name_of(func)
        if self._convolutions and func._schema.is_mutable:
            self._note_write(inputs)
        if name == "convolution":
            self._note_convolution(args, out)
        elif name in _BATCH_NORMS:
            self._note_batch_norm(args, out[0])
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


def _share_memory(one: Tensor, other: Tensor) -> bool:
    storage, others = storage_of(one), storage_of(other)
    return storage is not None and others is not None and storage._cdata == others._cdata


_BATCH_NORMS = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
}
"""Operators whose first result is the normalized input."""
