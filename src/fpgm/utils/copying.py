"""Copy a model: a deep copy that is fast for regular modules and works for unusual ones.

What cannot be copied (an open file, a generator, a logger's handlers) is shared with the original;
locks are replaced by new ones. Modules, parameters and buffers are never shared, unless the caller
puts them into the memo.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections import OrderedDict, deque
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.errors import ModelError
from fpgm.utils.modules import MODULE_ATTRIBUTES, all_modules, named_tensors
from fpgm.utils.preserve_state import CACHED_FUNCTION

Memo = dict[int, Any]
"""The copy of every object so far, by the id of the original, as in `copy.deepcopy`."""


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model with its weights, like `copy.deepcopy`, but also where that fails.

    >>> class Guarded(nn.Linear):
    ...     lock = None
    >>> net = Guarded(2, 2)
    >>> net.lock = threading.Lock()  # copy.deepcopy(net) fails on this
    >>> copy_model(net).weight is net.weight
    False
    """
    return clone(model, {})


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Copy a model without its weights: the copy shares them, but no hooks or attributes."""
    return clone(model, {id(tensor): tensor for tensor in named_tensors(model).values()})


def clone(model: nn.Module, memo: Memo) -> nn.Module:
    """Copy a model; objects in the memo are replaced by its values.

    Modules are copied attribute by attribute, several times faster than deepcopy. Those that copy
    themselves in their own way (`__deepcopy__`, `__getstate__`, scripted modules) are left to
    deepcopy, unless that fails or ignores the memo.
    """
    try:
        return _clone(model, memo)
    except RecursionError:
        raise ModelError(
            "The model holds containers nested too deeply to be copied: store them flat."
        ) from None


def _clone(model: nn.Module, memo: Memo) -> nn.Module:
    every = all_modules(model)
    ordinary = {kind for kind in set(map(type, every)) if _copies_by_attributes(kind)}
    modules = [m for m in every if type(m) in ordinary]
    for module in modules:
        memo[id(module)] = object.__new__(type(module))
    for module in modules:
        new = memo[id(module)].__dict__
        for name, value in module.__dict__.items():
            kind = type(value)
            if kind in _ATOMIC:
                new[name] = value
            elif name == "_modules":  # a child that copies itself needs its children first
                new[name] = kind()
            elif kind in _TABLES and not value and name in MODULE_ATTRIBUTES:
                new[name] = kind()  # nothing else refers to it
            elif name in _TENSOR_TABLES and kind is dict and id(value) not in memo:
                new[name] = memo[id(value)] = {
                    key: memo[id(tensor)] if id(tensor) in memo else _copy(tensor, memo)
                    for key, tensor in value.items()
                }
            elif name != "_compiled_call_impl":  # which calls the original; torch drops it too
                new[name] = _copy(value, memo)
    for module in reversed(modules):
        children = memo[id(module)].__dict__["_modules"]
        children.update((name, _copy(child, memo)) for name, child in module._modules.items())
    copied: nn.Module = _copy(model, memo)
    return copied


def _copies_by_attributes(kind: type[nn.Module]) -> bool:
    return (
        not issubclass(kind, torch.jit.ScriptModule)
        and not hasattr(kind, "__deepcopy__")
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__setstate__.__module__.startswith(_DEFAULT_SETSTATE)
        and getattr(kind, "__getstate__", None) is getattr(nn.Module, "__getstate__", None)
        and not hasattr(kind, "__slots__")
    )


_DEFAULT_SETSTATE = ("torch.nn.", "torch._dynamo.")
"""Modules whose `__setstate__` only fills in defaults; torch.compile replaces every module's."""

_ATOMIC = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type, BuiltinFunctionType, torch.dtype,
     torch.device, torch.Size, torch.memory_format)
)  # fmt: skip

_TENSOR_TABLES = ("_parameters", "_buffers")
_TABLES = (OrderedDict, dict, set)
"""What a module keeps parameters, buffers, children and hooks in."""

_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


def _copy(value: Any, memo: Memo) -> Any:
    """Copy any value."""
    kind = type(value)
    if kind in _ATOMIC:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in _CONTAINERS:
        return _copy_items(value, memo)
    if kind is FunctionType:
        return _copy_function(value, memo)
    if kind is weakref.ref:
        target = memo.get(id(value()))
        return value if target is None else weakref.ref(target)
    if kind in _LOCKS:
        new = _LOCKS[kind]()
    elif kind is CACHED_FUNCTION and _refers_to_model(value, memo):
        new = lru_cache(**value.cache_parameters())(_copy(value.__wrapped__, memo))
    elif kind is MethodType:
        new = MethodType(value.__func__, _copy(value.__self__, memo))
    elif kind is partial:
        new = partial(
            _copy(value.func, memo),
            *(_copy(v, memo) for v in value.args),
            **{k: _copy(v, memo) for k, v in value.keywords.items()},
        )
    elif isinstance(value, torch.jit.ScriptModule):
        new = _copy_scripted(value, memo)
    elif isinstance(value, Tensor) and not value.is_leaf:
        new = value.detach().clone()  # a cached result: deepcopy refuses those
    else:
        return _deepcopy(value, memo)
    memo[id(value)] = new
    return new


_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set, deque))


def _copy_scripted(module: torch.jit.ScriptModule, memo: Memo) -> torch.jit.ScriptModule:
    """Copy a scripted or traced module; torch would record the copying of its parameters.

    Then training the copy would put gradients into the original's parameters.
    """
    with torch.no_grad():
        new: torch.jit.ScriptModule = _deepcopy(module, memo)
    for parameter, copied in zip(module.parameters(), new.parameters(), strict=True):
        copied.requires_grad_(parameter.requires_grad)
    return new


def _copy_items(value: Any, memo: Memo) -> Any:
    if isinstance(value, tuple):
        items = tuple(_copy(item, memo) for item in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    new: Any = deque(maxlen=value.maxlen) if type(value) is deque else type(value)()
    memo[id(value)] = new
    if isinstance(value, dict):
        new.update((_copy(k, memo), _copy(v, memo)) for k, v in value.items())
    elif isinstance(value, set):
        new.update(_copy(item, memo) for item in value)
    else:
        new.extend(_copy(item, memo) for item in value)
    return new


def _copy_function(function: FunctionType, memo: Memo) -> FunctionType:
    """Let a function that holds a module or parameter of the model hold the copy's.

    Hooks of this package are not the model's: another thread may be tracing it.
    """
    ours = (function.__module__ or "").partition(".")[0] == "fpgm"
    if ours or not _refers_to_model(function, memo):
        return function

    def follow(value: Any) -> Any:
        return _copy(value, memo) if _refers_to_model(value, memo) else value

    cells = tuple(CellType() for _ in function.__closure__ or ())
    new = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells or None
    )
    memo[id(function)] = new  # it may refer to itself
    for cell, cell_before in zip(cells, function.__closure__ or (), strict=True):
        if cell_before != CellType():
            cell.cell_contents = follow(cell_before.cell_contents)
    if function.__defaults__ is not None:
        new.__defaults__ = tuple(map(follow, function.__defaults__))
    if function.__kwdefaults__:
        new.__kwdefaults__ = {k: follow(v) for k, v in function.__kwdefaults__.items()}
    new.__dict__.update((name, follow(value)) for name, value in function.__dict__.items())
    return new


def _refers_to_model(value: Any, memo: Memo) -> bool:
    """Return whether a value is part of the model, or refers to a part of it."""
    pending: list[Any] = [value]
    seen: set[int] = set()
    while pending and len(seen) < _MAX_VALUES:
        value = pending.pop()
        if isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and id(value) in memo):
            return True
        if type(value) not in _ATOMIC and id(value) not in seen:
            seen.add(id(value))
            pending += _referenced_values(value)
    return False


_MAX_VALUES = 10_000
"""How many values are searched: a function may refer to a whole data set."""


def _referenced_values(value: Any) -> list[Any]:
    """List the values that a function, method, container or user-defined object refers to."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        named = (value.__kwdefaults__ or {}).values()
        return [*cells, *(value.__defaults__ or ()), *named]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, CACHED_FUNCTION):
        return [value.__wrapped__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return list(value)
    home = type(value).__module__.partition(".")[0]
    if home in sys.stdlib_module_names or home in ("torch", "numpy") or isinstance(value, type):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _deepcopy(value: Any, memo: Memo) -> Any:
    """`copy.deepcopy`, and where that fails a copy of the object's attributes, or itself."""
    known = len(memo)
    try:
        new = copy.deepcopy(value, memo)
        if not _copies_itself(value) or _is_faithful(value, new, memo):
            return new
    except Exception:  # the object's own code may raise anything
        pass
    while len(memo) > known:  # undo a partial copy
        memo.popitem()
    if isinstance(value, Tensor):
        memo[id(value)] = value.detach().clone()
        return memo[id(value)]
    home = type(value).__module__.partition(".")[0]
    foreign = home in sys.stdlib_module_names or not hasattr(value, "__dict__")
    if foreign and not isinstance(value, dict | list):
        return value
    return _copy_attributes(value, memo)


def _copies_itself(value: Any) -> bool:
    """Whether a module's own code, not torch's, decides what a copy is."""
    method = getattr(type(value), "__deepcopy__", None)
    return isinstance(value, nn.Module) and not str(
        getattr(method, "__module__", "torch.")
    ).startswith("torch.")


def _is_faithful(module: nn.Module, new: Any, memo: Memo) -> bool:
    """Whether a copy has the tensors of the memo, and none of the original."""
    if type(new) is not type(module):
        return False
    tensors, copies = named_tensors(module), named_tensors(new)
    return tensors.keys() == copies.keys() and all(
        copies[name] is memo[id(t)]
        if id(t) in memo
        else copies[name] is not t and copies[name].shape == t.shape
        for name, t in tensors.items()
    )


def _copy_attributes(value: Any, memo: Memo) -> Any:
    try:
        kind: Any = type(value)
        new = kind.__new__(kind)
    except TypeError:
        return value
    memo[id(value)] = new
    for name, held in getattr(value, "__dict__", {}).items():
        new.__dict__[name] = _copy(held, memo)
    if isinstance(value, dict):
        dict.update(new, {_copy(k, memo): _copy(v, memo) for k, v in value.items()})
    elif isinstance(value, list):
        list.extend(new, [_copy(item, memo) for item in value])
    return new
