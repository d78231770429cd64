"""Log the operators that a model runs, to compare two forward passes.

Two passes compute the same if they run the same operators, with the same numbers, on the same
tensors. A pass can be recorded by shapes alone, so that nothing is computed: this takes a fraction
of the time of tracing labels, and is much faster than comparing outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fpgm.tracing import shape_inference
from fpgm.tracing.call_context import CallContext
from fpgm.tracing.ops import registry as rules
from fpgm.utils.channel_adapters import Adapted, adapters_of
from fpgm.utils.example_inputs import Example, tensors_in
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import (
    MODULE_ATTRIBUTES,
    modules_by_path,
    named_tensors,
    outer_modules_by_path,
)
from fpgm.utils.outputs import Leaf, read_outputs
from fpgm.utils.preserve_state import disable_compilation, disable_fused_attention
from fpgm.utils.rng import seed_torch
from fpgm.utils.thread_lock import suppress_warnings
from fpgm.utils.tracebacks import source_line

_SIZED = rules.FIXED_SIZE_OPS - {
    "channel_shuffle",
    "native_channel_shuffle",
    "as_strided",
    "as_strided_",
}
_SIZED |= {"native_layer_norm", "native_group_norm"}
"""Operators whose sizes follow the channels; a dry run compares those sizes with the labels."""

_SIZES = frozenset(
    ("size", "start", "end", "length", "split_size", "split_sizes", "normalized_shape", "N", "C",
     "HxW", "repeats", "pad")
)  # fmt: skip
"""What torch calls the sizes in those operators' arguments."""

_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit")

_MAX_NUMBERS = 4096
"""Constants that code makes outside of torch are compared by value up to this size."""


def name_tensors(model: nn.Module, example: Example) -> dict[int, str]:
    """Name the tensors that a model and its example hold, by their ids."""
    given = tensors_in((example.args, dict(example.kwargs)))
    names = {id(tensor): f"input {number}" for number, tensor in enumerate(given)}
    for path, module in modules_by_path(model).items():
        for name, value in module.__dict__.items():
            if type(value) in _NUMBERS or name in MODULE_ATTRIBUTES:
                continue
            if type(value) in _HOLDERS:
                for number, tensor in enumerate(tensors_in(value)):
                    names[id(tensor)] = f"{path}.{name}[{number}]"
            elif isinstance(value, Tensor):
                names[id(value)] = f"{path}.{name}"
    names |= {id(tensor): name for name, tensor in named_tensors(model).items()}
    return names


_NUMBERS = frozenset((int, float, bool, str, type(None)))
_HOLDERS = frozenset((list, tuple, dict))


class OperatorLog:
    """The operators of one forward pass, their arguments, and what the model returned."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.calls: list[tuple[Any, Any, Any]] = []
        """Operator, arguments, and those of its arguments that are sizes."""
        self.outputs: Any = None
        self.complete = True
        """Whether every operator could be described."""
        self._names = names
        """Names of tensors that existed before the pass, by their ids."""
        self._numbers: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        """Numbers of result tensors, by their ids, which other tensors may have by now."""
        self._count = 0
        self._fixed: set[int] = set()
        """Calls whose sizes are not channel counts, so they are the same in a narrower model."""
        self.paused = False
        """Whether one of our own adapters runs, whose operators are not the model's."""

    def fix_sizes(self) -> None:
        """Note that the sizes of the latest call are not channel counts."""
        self._fixed.add(len(self.calls) - 1)

    def pass_on(self, source: Tensor, out: Tensor) -> None:
        """Give a tensor the number of the tensor that one of our adapters rearranged."""
        self._number(out, self._describe(source))

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a call before it runs, because it may change its arguments."""
        if self.paused:
            return
        if isinstance(func, HigherOrderOperator):
            self.complete = False
            return
        if func is _ADD_ and self._counts_batches(args):
            return
        values = [self._describe(value) for value in args]
        sizes: list[Any] = []
        special, is_sized = _special_positions(func)
        for position, is_size in special:
            if position < len(values):
                if is_size:
                    sizes.append(values[position])
                values[position] = None
        if is_sized:  # another mode may get the same size from elsewhere, on another line
            values.append(source_line())
        if kwargs:
            values += [(name, self._describe(kwargs[name])) for name in sorted(kwargs)]
        self.calls.append((func, values, sizes))

    def add_results(self, results: Iterable[Tensor]) -> None:
        """Assign numbers to the tensors that a call returned."""
        for tensor in results:
            if id(tensor) not in self._names:
                self._count += not self.paused
                self._number(tensor, f"result {self._count}")

    def end(self, leaves: Iterable[Leaf]) -> None:
        """Note what the model returns."""
        self.outputs = self._describe([(leaf.path, leaf.value) for leaf in leaves])

    def is_same(self, other: OperatorLog, *, sizes_may_differ: bool) -> bool:
        """Tell whether two passes run the same operators on the same tensors.

        Args:
            other: The pass of another model with the same parameter names, or in another mode.
            sizes_may_differ: Leave sizes of tensors out, where one model is narrower.
        """
        if not self.complete or not other.complete or self.outputs != other.outputs:
            return False
        if not sizes_may_differ or len(self.calls) != len(other.calls):
            return self.calls == other.calls
        fixed = self._fixed | other._fixed
        pairs = enumerate(zip(self.calls, other.calls, strict=True))
        return all(
            a[0] is b[0] and a[1] == b[1] and (number not in fixed or a[2] == b[2])
            for number, (a, b) in pairs
        )

    def _counts_batches(self, args: Sequence[Any]) -> bool:
        """Tell whether a batch norm counts its batches by one, which only train mode does."""
        name = self._names.get(id(args[0]), "")
        own = name.rpartition(".")[2] == "num_batches_tracked"
        return own and type(args[1]) is int and args[1] == 1

    def _describe(self, value: Any) -> Any:
        """Name tensors by their origin; other values are kept as they are."""
        if type(value) in _NUMBERS:
            return value
        if isinstance(value, Tensor):
            known = self._numbers.get(id(value))
            if known is not None and known[0]() is value:
                return known[1]
            return self._describe_unnumbered(value)
        if isinstance(value, list | tuple):
            return [self._describe(item) for item in value]
        return value

    def _describe_unnumbered(self, tensor: Tensor) -> Any:
        name = self._names.get(id(tensor))
        if name is not None:
            return name
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if tensor.layout is not torch.strided or tensor.numel() > _MAX_NUMBERS:
                self.complete = False
                return None
            try:
                return str(tensor.dtype), tuple(tensor.shape), repr(tensor.tolist())
            except (RuntimeError, TypeError):  # a subclass may hold no numbers of its own
                self.complete = False
                return None

    def _number(self, tensor: Tensor, number: Any) -> None:
        self._numbers[id(tensor)] = weakref.ref(tensor), number


def record_operators(model: nn.Module, example: Example) -> OperatorLog | None:
    """Run a model by shapes alone and list its operators; None if that needs values or fails.

    The caller sets the mode and restores what the model's code changes.
    """
    log = OperatorLog(name_tensors(model, example))
    seed_torch(0)
    try:
        with _passing_adapters(model, log), _record_into(log):
            out = example.call(model)
        log.end(read_outputs(out))
    except (
        Exception,
        shape_inference.ValuesNeededError,
    ):  # the model's own code may raise anything
        return None
    return log


@contextmanager
def _record_into(log: OperatorLog) -> Iterator[None]:
    with (
        suppress_warnings(),
        torch.inference_mode(False),
        torch.no_grad(),
        disable_fused_attention(),
        disable_compilation(),
        CallContext(_refuse_to_read, {F.dropout: return_input}),
        _Recorder(log),
    ):
        yield


@contextmanager
def _passing_adapters(model: nn.Module, log: OperatorLog) -> Iterator[None]:
    """Treat the output of our own adapters as their input."""

    def start(part: nn.Module, args: Any) -> None:
        log.paused = True

    def stop(part: nn.Module, args: Any, out: Any) -> None:
        log.paused = False
        log.pass_on(args[0], out)

    with temporary_hooks() as handles:
        for path, module in outer_modules_by_path(model).items():
            if isinstance(module, Adapted):
                for part, _ in adapters_of(module, path):
                    handles.append(part.register_forward_pre_hook(start))
                    handles.append(part.register_forward_hook(stop))
        yield


class _Recorder(TorchDispatchMode):
    """Lists operators as they run; heavy ones return zeros of the right shape."""

    supports_higher_order_operators = True

    def __init__(self, log: OperatorLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not hasattr(torch.compiler, "set_stance")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if makes_nothing(func, args):
            return func(*args, **kwargs)
        out = shape_inference.infer_shape(func, args, kwargs)
        self.log.add(func, args, kwargs)
        if out is None:
            if func._schema.is_mutable and args and isinstance(args[0], nn.Parameter):
                raise shape_inference.ValuesNeededError  # initialized from its first input
            out = func(*args, **kwargs)
        self.log.add_results(rules.tensors((out,)))
        return out


def makes_nothing(func: Any, args: Sequence[Any]) -> bool:
    """Tell whether a call only makes an empty tensor, as every batch norm does beside its result.

    >>> makes_nothing(torch.ops.aten.empty.memory_format, ([0],))
    True
    """
    return func is _EMPTY and args[0] == [0]


def return_input(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the input: train mode is compared with eval mode, without dropout."""
    return x


def _refuse_to_read(tensor: Tensor, method: str) -> None:
    """Stop if the model's code takes values out of torch."""
    raise shape_inference.ValuesNeededError


_EMPTY = torch.ops.aten.empty.memory_format
_ADD_ = torch.ops.aten.add_.Tensor


@cache
def _special_positions(func: Any) -> tuple[tuple[tuple[int, bool], ...], bool]:
    """List the positions of arguments that are sizes (True), or that only tell the mode (False).

    Also tells whether the operator's sizes may be numbers in the user's code.

    >>> _special_positions(torch.ops.aten.view.default)
    (((1, True),), True)
    >>> _special_positions(torch.ops.aten.mul.Scalar)
    ((), False)
    """
    name = rules.name_of(func)
    sizes = {"groups"} if name == "convolution" else _SIZES if name in _SIZED else set()
    modes = {"training", "momentum"} if name in _BATCH_NORMS else set()
    positions = tuple(
        (i, argument.name in sizes)
        for i, argument in enumerate(func._schema.arguments)
        if argument.name in sizes or argument.name in modes
    )
    return positions, name in _SIZED
