"""Restore everything that a forward pass changes in a model.

That includes the mode, buffers, random state, parameters, and values that modules keep in plain
attributes: cached tensors, counters, lists that grow. Long lists and large tensors of objects
outside the model are not copied.
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

from fpgm.utils.kept_weights import KeptWeights
from fpgm.utils.modules import all_modules
from fpgm.utils.thread_lock import GLOBAL_LOCK


@contextmanager
def preserve_state(model: nn.Module, *, watched: bool = True) -> Iterator[ModelState]:
    """Restore mode, state and random numbers afterwards; one thread at a time.

    Yields the saved state, which can also be restored in between.

    Args:
        model: The model.
        watched: Keep weights that are written into, by watching every operator. A tracer, which
            sees them all anyway, tells the state's `weights` itself.
    """
    with GLOBAL_LOCK:
        state = ModelState(model)
        try:
            with preserve_rng():
                state.weights = KeptWeights(model)
                with state.weights if watched else nullcontext():
                    yield state
        finally:
            state.restore()


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the random state of Python, numpy and torch afterwards."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


class ModelState:
    """The state of a model's modules: attributes, containers in them, and values of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}
        """Every container and object, with a copy of its contents."""
        self._empty: list[Any] = []
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._parameters: dict[int, tuple[nn.Parameter, Tensor, bool]] = {}
        self._scripted: list[tuple[nn.Module, bool]] = []
        self._caches: dict[int, tuple[Any, int]] = {}
        """Functions that remember their results, with how often they had to compute one."""
        self.weights: KeptWeights | None = None
        """The weights that passes have written into since."""
        self._pending: list[tuple[Any, bool]] = []
        """Values still to look at, and whether only an object outside the model holds them."""
        for module in all_modules(model):
            kind: Any = type(module)
            for function in _cached_methods(kind):
                self._record_cache(function)
            if isinstance(module, torch.jit.ScriptModule):
                self._scripted.append((module, module.training))
            else:
                self._pending.append((module, False))
        while self._pending:
            self._record(*self._pending.pop())

    def _record_layer(self, layer: nn.Module) -> None:
        """Record a layer of torch's own: its attributes, its tensors, and that it has no hooks."""
        attributes = vars(layer)
        self._held[id(layer)] = (layer, attributes.copy())
        for name in _TABLES & attributes.keys():
            table = attributes[name]
            if table:
                self._pending.append((table, False))
            elif isinstance(table, dict):
                self._empty.append(table)

    def _record(self, value: Any, outside: bool) -> None:
        """Record a mutable value; its contents are read later."""
        if id(value) in self._held or isinstance(value, torch.jit.ScriptModule):
            return
        if isinstance(value, Tensor):
            self._record_tensor(value, outside)
        elif isinstance(value, dict | list | set | deque):
            if outside and len(value) > _MAX_ITEMS:
                return
            if value:
                self._held[id(value)] = (value, value.copy())
                self._record_all(value.values() if isinstance(value, dict) else value, outside)
            else:
                self._empty.append(value)
        elif isinstance(value, tuple):
            self._record_all(value, outside)
        elif isinstance(value, CACHED_FUNCTION):
            self._record_cache(value)
        elif isinstance(value, nn.Module) and type(value).__module__.startswith("torch.nn."):
            self._record_layer(value)
        elif isinstance(value, nn.Module) or is_plain_object(value):
            self._held[id(value)] = (value, vars(value).copy())
            self._record_all(vars(value).values(), not isinstance(value, nn.Module))

    def _record_tensor(self, value: Tensor, outside: bool) -> None:
        if isinstance(value, nn.Parameter):
            self._parameters[id(value)] = (value, value.data, value.requires_grad)
        elif not value.is_meta and not (outside and value.numel() > _MAX_NUMBERS):
            self._values.setdefault(id(value), (value, value.detach().clone()))

    def _record_cache(self, function: Any) -> None:
        self._caches.setdefault(id(function), (function, function.cache_info().misses))

    def _record_all(self, values: Iterable[Any], outside: bool) -> None:
        self._pending += [(value, outside) for value in values if type(value) not in _ATOMIC]

    def restore(self, except_for: Collection[int] = ()) -> None:
        """Restore everything, the same objects in the same places.

        Args:
            except_for: Ids of tensors that keep their new values.
        """
        for value in self._empty:
            if value:
                value.clear()
        for value, before in self._held.values():
            now = value if isinstance(value, dict | list | set | deque) else vars(value)
            if not _is_same(now, before):
                _restore_items(now, before)
        for function, misses in self._caches.values():
            if function.cache_info().misses != misses:  # it may have cached values of the trace
                function.cache_clear()
        for module, training in self._scripted:
            module.train(training)
        with torch.no_grad():
            for tensor, values in self._values.values():
                if id(tensor) in except_for:
                    continue
                if tensor.shape != values.shape:
                    tensor.data = values
                elif tensor.layout != torch.strided or not torch.equal(tensor, values):
                    tensor.copy_(values)
        for parameter, data, trained in self._parameters.values():
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        if self.weights is not None:
            self.weights.restore()


CACHED_FUNCTION = type(functools.lru_cache(id))
"""Functions that remember their results."""


@functools.cache
def _cached_methods(kind: type) -> tuple[Any, ...]:
    """List the methods of a class that cache their results."""
    classes = (base for base in kind.__mro__ if not base.__module__.startswith("torch."))
    return tuple(
        value
        for base in classes
        for value in vars(base).values()
        if isinstance(value, CACHED_FUNCTION)
    )


_MAX_ITEMS = 1000
_MAX_NUMBERS = 2**20
"""Contents of objects outside the model (a trainer's data set) are saved only up to these sizes."""

_TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""What every module holds: its parameters, buffers, children and hooks."""

_ATOMIC = frozenset((int, float, complex, bool, str, bytes, type(None), type, torch.Size,
                     torch.dtype, torch.device))  # fmt: skip


def is_plain_object(value: Any) -> bool:
    """Tell whether an object is of a user class, with attributes that can be restored."""
    home = type(value).__module__.partition(".")[0]
    return (
        home not in sys.stdlib_module_names
        and home not in ("torch", "numpy")
        and hasattr(value, "__dict__")
        and not isinstance(value, type)
    )


def _restore_items(now: Any, before: Any) -> None:
    """Restore a container's items; other threads may read a dict meanwhile."""
    if isinstance(now, dict):
        for key in [key for key in now if key not in before]:
            del now[key]
        now.update(before)
        if all(map(operator.is_, now, before)):
            return
    now.clear()
    fill = now.extend if isinstance(now, list | deque) else now.update
    fill(before)


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
def disable_fused_attention() -> Iterator[None]:
    """Disable the fused transformer path, whose operators a trace cannot see."""
    with GLOBAL_LOCK:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


def disable_compilation() -> AbstractContextManager[object]:
    """Run eagerly what would be compiled (`torch.cond`): torch compiles nothing under modes.

    It would also cache the failure, and then reject the same code without a mode.
    """
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return nullcontext() if stance is None else stance("force_eager")
