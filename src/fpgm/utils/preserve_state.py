"""Running a model only to look at it: what a forward pass changes is put back afterwards.

That is mode, buffers, random numbers, and what modules keep in plain attributes: cached tensors,
counters, lists that grow. Values of parameters are not copied: a forward pass that writes into its
parameters in place changes them for good. Nor are long lists and large tensors of other objects.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.utils.locking import TURN
from fpgm.utils.modules import every_module


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore mode, state and random numbers afterwards; one thread at a time."""
    with TURN:
        state = State(model)
        numbers = random.getstate()
        numpy = sys.modules.get("numpy")
        drawn = None if numpy is None else numpy.random.get_state()
        try:
            with torch.random.fork_rng():
                yield
        finally:
            random.setstate(numbers)
            if numpy is not None:
                numpy.random.set_state(drawn)
            state.restore()


class State:
    """What a model's modules hold: attributes, containers in them, and values of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}
        """Every container and object, with a copy of what it held."""
        self._empty: list[Any] = []
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._parameters: dict[int, tuple[nn.Parameter, Tensor, bool]] = {}
        self._scripted: list[tuple[nn.Module, bool]] = []
        self._caches: dict[int, tuple[Any, int]] = {}
        """Functions that remember their results, with how often they had to compute one."""
        self._waiting: list[tuple[Any, bool]] = []
        """Values still to look at, and whether only an object outside the model holds them."""
        for module in every_module(model):
            kind: Any = type(module)
            for function in _cached_methods(kind):
                self._note_cache(function)
            if isinstance(module, torch.jit.ScriptModule):
                self._scripted.append((module, module.training))
            else:
                self._waiting.append((module, False))
        while self._waiting:
            self._note(*self._waiting.pop())

    def _note_layer(self, layer: nn.Module) -> None:
        """Remember a layer of torch's own: its attributes, its tensors, that it has no hooks."""
        own = vars(layer)
        self._held[id(layer)] = (layer, own.copy())
        for name in _TABLES & own.keys():
            table = own[name]
            if table:
                self._waiting.append((table, False))
            elif isinstance(table, dict):
                self._empty.append(table)

    def _note(self, value: Any, outside: bool) -> None:
        """Remember a value that can change; what it holds is looked at later."""
        if id(value) in self._held or isinstance(value, torch.jit.ScriptModule):
            return
        if isinstance(value, Tensor):
            self._note_tensor(value, outside)
        elif isinstance(value, dict | list | set | deque):
            if outside and len(value) > _MOST_ITEMS:
                return
            if value:
                self._held[id(value)] = (value, value.copy())
                self._note_all(value.values() if isinstance(value, dict) else value, outside)
            else:
                self._empty.append(value)
        elif isinstance(value, tuple):
            self._note_all(value, outside)
        elif isinstance(value, CACHED):
            self._note_cache(value)
        elif isinstance(value, nn.Module) and type(value).__module__.startswith("torch.nn."):
            self._note_layer(value)
        elif isinstance(value, nn.Module) or _is_plain_object(value):
            self._held[id(value)] = (value, vars(value).copy())
            self._note_all(vars(value).values(), not isinstance(value, nn.Module))

    def _note_tensor(self, value: Tensor, outside: bool) -> None:
        if isinstance(value, nn.Parameter):
            self._parameters[id(value)] = (value, value.data, value.requires_grad)
        elif not value.is_meta and not (outside and value.numel() > _MOST_NUMBERS):
            self._values.setdefault(id(value), (value, value.detach().clone()))

    def _note_cache(self, function: Any) -> None:
        self._caches.setdefault(id(function), (function, function.cache_info().misses))

    def _note_all(self, values: Iterable[Any], outside: bool) -> None:
        self._waiting += [(value, outside) for value in values if type(value) not in _ATOMIC]

    def restore(self, except_for: Collection[int] = ()) -> None:
        """Put everything back, the same objects in the same places.

        Args:
            except_for: Ids of tensors that keep their new values.
        """
        for value in self._empty:
            if value:
                value.clear()
        for value, before in self._held.values():
            now = value if isinstance(value, dict | list | set | deque) else vars(value)
            if not _is_same(now, before):
                now.clear()
                fill = now.extend if isinstance(now, list | deque) else now.update
                fill(before)
        for function, misses in self._caches.values():
            if function.cache_info().misses != misses:  # it may remember what was only looked at
                function.cache_clear()
        for module, training in self._scripted:
            module.train(training)
        with torch.no_grad():
            for tensor, values in self._values.values():
                if id(tensor) in except_for:
                    continue
                if tensor.shape != values.shape:
                    tensor.data = values
                elif not torch.equal(tensor, values):
                    tensor.copy_(values)
        for parameter, data, trained in self._parameters.values():
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


CACHED = type(functools.lru_cache(id))
"""Functions that remember their results."""


@functools.cache
def _cached_methods(kind: type) -> tuple[Any, ...]:
    """List the methods of a class that remember their results."""
    own = (base for base in kind.__mro__ if not base.__module__.startswith("torch."))
    return tuple(
        value for base in own for value in vars(base).values() if isinstance(value, CACHED)
    )


_MOST_ITEMS = 1000
_MOST_NUMBERS = 2**20
"""What objects outside the model hold (a trainer's data set) is kept up to these sizes only."""

_TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""What every module holds: its parameters, buffers, children and hooks."""

_ATOMIC = frozenset((int, float, complex, bool, str, bytes, type(None), type, torch.Size,
                     torch.dtype, torch.device))  # fmt: skip


def _is_plain_object(value: Any) -> bool:
    """Whether an object is of a class of the user's own, with attributes that can be put back."""
    home = type(value).__module__.partition(".")[0]
    return (
        home not in sys.stdlib_module_names
        and home not in ("torch", "numpy")
        and hasattr(value, "__dict__")
        and not isinstance(value, type)
    )


def _is_same(now: Any, before: Any) -> bool:
    """Whether a container still holds the very same objects."""
    if isinstance(now, set):
        return bool(now == before)
    if len(now) != len(before):
        return False
    if isinstance(now, dict) and not all(map(operator.is_, now, before)):
        return False
    pair = (now.values(), before.values()) if isinstance(now, dict) else (now, before)
    return all(map(operator.is_, *pair))


@contextmanager
def plain_attention() -> Iterator[None]:
    """The fused transformer path hides its operators; use the plain one while watching."""
    with TURN:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


def without_compiling() -> AbstractContextManager[object]:
    """Run eagerly what asks to be compiled (`torch.cond` does): torch compiles nothing under modes.

    It would also remember that for good, and then refuse the same code without a mode.
    """
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return nullcontext() if stance is None else stance("force_eager")
