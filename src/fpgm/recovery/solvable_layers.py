"""Find the layers whose weights can be solved for, in execution order, and where their outputs go.

A layer's output may pass through a batch norm, be scattered into a residual stream's channels, and
be added to the stream. If nothing else uses the output, the target is the sum, so that the layer
also corrects errors that the stream has from earlier layers. Layers that cannot be solved are
listed with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

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


ConvolutionCallback = Callable[[str, tuple[Any, ...], Tensor], "Tensor | None"]


class ConvolutionCalls(TorchFunctionMode):
    """Calls a function after convolutions of layers that have a forward of their own.

    Such a forward may do more before and after the convolution: pad, normalize, activate.
    """

    def __init__(self, paths: Mapping[int, str], callback: ConvolutionCallback) -> None:
        """Prepare the mode.

        Args:
            paths: of the layers, by the ids of their weights.
            callback: called with the path, the arguments of `aten::convolution`, and the output; it
                may return another output.
        """
        super().__init__()
        self._paths, self._callback = paths, callback

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        path = None
        if func in _CONVOLUTIONS:
            path = self._paths.get(id(args[1] if len(args) > 1 else kwargs.get("weight")))
        if path is None:
            return func(*args, **kwargs)
        with _ConvolutionArguments() as convolution:
            out = func(*args, **kwargs)
        if convolution.arguments is None:
            return out
        changed = self._callback(path, convolution.arguments, out)
        return out if changed is None else changed


_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


class _ConvolutionArguments(TorchDispatchMode):
    """Notes the arguments of a convolution, with padding by name replaced by numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arguments: tuple[Any, ...] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if name_of(func) == "convolution":
            self.arguments = args
        return func(*args, **(kwargs or {}))


def custom_forwards(model: nn.Module, layers: Iterable[SolvableLayer]) -> dict[int, str]:
    """Return the paths of layers with a forward of their own, by the ids of their weights."""
    own = [layer.path for layer in layers if layer.arguments is not None]
    return {id(module_at(model, path).weight): path for path in own}


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
        self._arguments: dict[str, ConvArguments] = {}
        """What their forwards pass to the convolution."""
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
            convolutions = ConvolutionCalls(self._own_weights, self._on_convolution)
            with torch.no_grad(), convolutions, self:
                example.call(self.model)

    def _layer_hook(self, path: str, why: str | None) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if why is not None or is_plain(module):
                self._add_call(path, args, out, why or _why_no_rows(module, out))
            elif path not in {*self._arguments, *self.unsolvable}:
                self._add_call(path, args, out, "its forward does not convolve with its weights")

        return hook

    def _on_convolution(self, path: str, args: tuple[Any, ...], out: Tensor) -> None:
        """Note a call of a layer with a forward of its own."""
        layer, bias, groups = module_at(self.model, path), args[2], args[8]
        arguments = _conv_arguments(args)
        reason = _why_no_rows(layer, out)
        if bias is not layer.bias or groups != layer.groups or arguments is None:
            reason = "its forward convolves with another bias or with other groups"
        elif self._arguments.setdefault(path, arguments) != arguments:
            reason = "its forward convolves with other strides or paddings in each call"
        self._add_call(path, args[:1], out, reason)

    def _add_call(self, path: str, args: tuple[Any, ...], out: Any, why: str | None) -> None:
        """Note a call of a layer, or why the layer cannot be solved."""
        if why is not None:
            self.unsolvable[path] = why
            self._calls.pop(path, None)
            self._events = [event for event in self._events if event != path]
        if path in self.unsolvable:
            return
        size = sum(t.nbytes for t in tensors((*args, out)))
        self.largest_bytes = max(self.largest_bytes, size)
        if self._calls[path]:
            self._events.remove(path)
        self._events.append(path)
        self._calls[path] += 1
        self._outputs[out] = _LayerOutput(path)

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
        if name in _BATCH_NORMS:
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


_BATCH_NORMS = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
}
"""Operators whose first result is the normalized input."""
