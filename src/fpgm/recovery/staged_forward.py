"""Forward passes that pause at each solvable layer, and continue with its new weights.

Each layer is solved with the inputs it gets from the layers before it, which are already solved.
Running the model again for every layer would take time quadratic in its depth. So a pass runs in
its own thread and waits there while the layer is solved, unless there are very many batches. If
memory is short, the activations it holds are offloaded in the meantime (`activation_offload`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fpgm.recovery.activation_offload import ActivationOffload, LiveActivations, RestoreOnAccess
from fpgm.recovery.solvable_layers import (
    ConvolutionCalls,
    SolvableLayer,
    custom_forwards,
    is_addition,
)
from fpgm.recovery.unfold import input_of
from fpgm.tracing.ops.registry import tensors
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.copying import copy_sharing_weights
from fpgm.utils.default_device import users_default_device
from fpgm.utils.example_inputs import Example, map_tensors, tensors_in
from fpgm.utils.modules import module_at

MAX_PAUSED_BATCHES = 128
"""Batches whose passes may be paused: each takes two threads, with a pool of workers and buffers of
their own. More run again for every layer."""


@dataclass
class LayerActivations:
    """Inputs and outputs of a layer's calls, and the addition its output goes into, if any."""

    inputs: list[Tensor] = field(default_factory=list)
    """What each call multiplies by the weights; may be left out for the original model."""
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """Arguments of each call, or of its convolution, if they are needed to compute it again."""
    outputs: list[Tensor] = field(default_factory=list)
    sum: Tensor | None = None
    """The sum that the layer's output goes into, of the original model."""
    other_operand: Tensor | None = None
    """What the layer's output is added to."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the record."""
        others = [t for t in (self.sum, self.other_operand) if t is not None]
        return [*self.inputs, *self.outputs, *tensors_in(self.arguments), *others]


class _PassClosedError(BaseException):
    """Ends a pass that is not needed. Not an `Exception`, which the model's code might catch."""


class StagedForward:
    """One forward pass over one batch, which pauses at each layer."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[SolvableLayer],
        example: Example,
        store: ActivationOffload,
        *,
        first: int = 0,
        recompute: bool = False,
    ) -> None:
        """Prepare a pass; it starts at the first `advance_to`.

        Args:
            model: not changed; its weights are shared, its attributes are not.
            layers: all solvable layers.
            example: the batch.
            store: where `offload` puts activations.
            first: number of the first layer to pause at.
            recompute: compute a layer's output again with its new weights on continuing.
        """
        self._model = copy_sharing_weights(
            model
        )  # the same weights, but passes do not share attributes
        self._layers, self._example, self._recompute = layers, example, recompute
        self._live = LiveActivations(store)
        self._calls: Counter[str] = Counter()
        self._records: dict[int, LayerActivations] = {}
        self._paused_at: int | None = None
        self._error: BaseException | None = None
        self._done = self._closed = False
        self._go_on, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        run = partial(copy_context().run, self._run)  # the model may read the caller's variables
        self._thread = threading.Thread(target=run, daemon=True)
        self._by_addition: dict[int, list[int]] = {}
        self._custom_forwards = custom_forwards(self._model, layers[first:])
        self._numbers = {layer.path: number for number, layer in enumerate(layers)}
        for number, layer in list(enumerate(layers))[first:]:
            if layer.arguments is None:
                # Before all other hooks: an adapter may gather or scatter channels of the output.
                # Never removed, for the model is our own copy and ends with the pass.
                module = module_at(self._model, layer.path)
                module.register_forward_hook(self._hook(number), prepend=True, with_kwargs=True)
            if layer.addition is not None:
                self._by_addition.setdefault(layer.addition.number, []).append(number)

    def advance_to(self, number: int) -> LayerActivations | None:
        """Continue to a layer and return its record; None if this pass does not reach it."""
        while not self._done and (self._paused_at is None or self._paused_at < number):
            self._resume()
        if self._error is not None:
            raise self._error
        return self._records[number] if self._paused_at == number else None

    def offload(self) -> None:
        """Free the memory of what the paused pass holds, until it continues."""
        self._live.offload()

    def close(self) -> None:
        """End the pass early, also while its thread is between two layers."""
        self._closed = True
        if self._thread.ident is not None:
            self._go_on.release()
            self._thread.join()
        self._records.clear()

    def _resume(self) -> None:
        self._records.pop(-1 if self._paused_at is None else self._paused_at, None)
        self._paused_at = None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go_on.release()
        self._paused.acquire()

    def _run(self) -> None:
        try:
            mode = _PassMode(self._live, self._on_addition)
            convolutions = ConvolutionCalls(self._custom_forwards, self._on_convolution)
            with torch.no_grad(), RestoreOnAccess(self._live), convolutions, mode:
                copied = map_tensors(self._example, Tensor.clone)  # some models write into inputs
                self._example = Example((), {})  # others may be done with it
                with users_default_device():
                    self._model(*copied.args, **copied.kwargs)
        except _PassClosedError:
            pass
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
        finally:
            self._done = True
            self._paused.release()

    def _pause(self, number: int) -> None:
        """Wait until `_resume` is called from the other thread."""
        self._live.restore(*self._records[number].tensors())
        self._paused_at = number
        self._paused.release()
        if not self._closed:
            self._go_on.acquire()
        if self._closed:
            raise _PassClosedError

    def _hook(self, number: int) -> Callable[..., Tensor | None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
            return self._on_call(number, args, kwargs, out)

        return hook

    def _on_convolution(self, path: str, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
        return self._on_call(self._numbers[path], args, {}, out)

    def _on_call(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> Tensor | None:
        """Pause after a call of a layer, and return its output with the new weights.

        Args:
            number: of the layer.
            args: of the call; of its convolution, if the layer has a forward of its own.
            kwargs: the same.
            out: its output.
        """
        layer = self._layers[number]
        record = self._records.setdefault(number, LayerActivations())
        x = input_of(args, kwargs)
        self._calls[layer.path] += 1
        if layer.addition is not None or self._calls[layer.path] < layer.calls:
            # The model continues, and may overwrite these tensors in place.
            record.outputs.append(out.clone())
            if self._recompute:
                given = [x] if layer.arguments is not None else tensors_in((args, kwargs))
                copies = {id(t): t.clone() for t in (x, *given)}
                copied = tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
                record.arguments.append(copied)
                record.inputs.append(copies[id(x)])
            return None
        record.inputs.append(x)
        record.outputs.append(out)
        self._pause(number)
        if not self._recompute:
            return None
        return _compute_again(layer, module_at(self._model, layer.path), args, kwargs)

    def _on_addition(self, addition: int, operands: Sequence[Tensor]) -> None:
        """Pause for the layers whose outputs are about to be added."""
        for number in self._by_addition.get(addition, ()):
            layer, record = self._layers[number], self._records.get(number)
            if record is None or operands[0].shape != operands[1].shape:
                continue  # the model takes another path for this batch
            assert layer.addition is not None
            self._live.restore(*operands)  # offloaded while another layer's pass was paused here
            branch = operands[layer.addition.operand]
            record.other_operand = operands[1 - layer.addition.operand]
            if not self._recompute:
                record.sum = branch + record.other_operand
            self._pause(number)
            if self._recompute:
                self._live.restore(branch, *tensors_in(record.arguments))
                branch.copy_(self._compute_branch(layer, record, branch))

    def _compute_branch(
        self, layer: SolvableLayer, record: LayerActivations, before: Tensor
    ) -> Tensor:
        """Compute the operand of an addition again, with the layer's new weights."""
        args, kwargs = record.arguments[0]
        module = module_at(self._model, layer.path)
        out = _compute_again(layer, module, args, kwargs)
        if layer.batch_norm is not None:
            out = _normalize(module_at(self._model, layer.batch_norm), out)
        assert layer.addition is not None
        if layer.addition.channels is None:
            return out
        channels = torch.tensor(layer.addition.channels, device=out.device)
        return torch.zeros_like(before).index_copy(layer.addition.dim, channels, out)


def _compute_again(
    layer: SolvableLayer, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Compute a layer's output with its new weights.

    A forward of its own is not called twice, as it may do more than to compute this output: `args`
    are of its convolution.
    """
    if layer.arguments is not None:
        return torch.convolution(*args)
    out: Tensor = module.forward(*args, **kwargs)
    return out


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a batch norm in eval mode, without the activation that a subclass may add."""
    assert isinstance(norm, _BatchNorm)
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    return F.batch_norm(x, norm.running_mean, norm.running_var, weight, bias, eps=eps)


class _PassMode(TorchDispatchMode):
    """Restores tensors before they are used, and calls a function before every addition."""

    def __init__(
        self,
        live: LiveActivations,
        callback: Callable[[int, Sequence[Tensor]], None],
    ) -> None:
        """Prepare the mode.

        Args:
            live: the pass's activations.
            callback: called with an addition's number in the pass, and its operands.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._live, self._callback = live, callback
        self._number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        used = list(tensors((*args, *(kwargs or {}).values())))
        self._live.restore(*used)
        if is_addition(func, args, kwargs):
            self._callback(self._number, args)
            self._number += 1
            self._live.restore(*used)
        out = func(*args, **(kwargs or {}))
        self._live.add(tensors((out,)), used)
        return out


class PairedForwards:
    """Staged passes of the compact and the original model, over all batches."""

    def __init__(
        self,
        model: nn.Module,
        small: nn.Module,
        layers: Sequence[SolvableLayer],
        inputs: Inputs,
        *,
        offload: bool,
        max_bytes: int,
    ) -> None:
        """Prepare the passes.

        Args:
            model: the original.
            small: the compact model.
            layers: layers to pause at.
            inputs: all batches.
            offload: whether paused passes free the memory of their activations.
            max_bytes: how much memory offloaded activations may take; the rest goes to a file.
        """
        self.layers, self.inputs = layers, inputs
        self._model, self._small, self._offload = model, small, offload
        self._store = ActivationOffload(max_bytes)
        self._passes: dict[int, tuple[StagedForward, StagedForward]] = {}

    def records_at(self, number: int) -> Iterator[tuple[int, LayerActivations, LayerActivations]]:
        """Yield for each batch its number and the layer's records: compact, then original."""
        for batch in range(len(self.inputs)):
            pair = self._passes.get(batch) or self._start(batch, number)
            compact, original = (staged.advance_to(number) for staged in pair)
            if compact is not None and original is not None:
                yield batch, compact, original
            # Between two calls of a layer, activations were computed with its old weights.
            if self.layers[number].calls > 1 or batch >= MAX_PAUSED_BATCHES:
                for staged in self._passes.pop(batch):
                    staged.close()
            elif self._offload:
                for staged in pair:
                    staged.offload()

    def close(self) -> None:
        """End all passes early."""
        for pair in self._passes.values():
            for staged in pair:
                staged.close()
        self._passes.clear()
        self._store.close()

    def _start(self, batch: int, number: int) -> tuple[StagedForward, StagedForward]:
        example, layers, store = self.inputs[batch], self.layers, self._store
        self._passes[batch] = (
            StagedForward(self._small, layers, example, store, first=number, recompute=True),
            StagedForward(self._model, layers, example, store, first=number),
        )
        return self._passes[batch]
