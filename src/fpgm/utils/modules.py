"""A model's modules, parameters and buffers by name, and the model inside its wrappers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.utils.channel_adapters import Adapted, unwrap


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return the user's own modules under their names in the original model.

    Like `dict(model.named_modules())`, but faster, and without wrappers that move channels: the
    module inside a wrapper gets its path.
    """
    index = _INDEXES.get().get(id(model))
    return _unwrap_all(_find_modules(model)) if index is None else dict(index.modules)


def outer_modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return what the user's code calls under each name: modules, or the wrappers around them."""
    index = _INDEXES.get().get(id(model))
    return _find_modules(model) if index is None else dict(index.called)


def _unwrap_all(called: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        path: unwrap(module) if isinstance(module, Adapted) else module
        for path, module in called.items()
    }


@dataclass
class _ModuleIndex:
    """A model's modules and tensors by name."""

    model: nn.Module
    called: dict[str, nn.Module]
    modules: dict[str, nn.Module]
    tensors: dict[str, Tensor]


_INDEXES: ContextVar[Mapping[int, _ModuleIndex]] = ContextVar("walks", default={})  # noqa: B039


@contextmanager
def cache_modules(model: nn.Module) -> Iterator[None]:
    """Cache a model's modules and tensors; the block must leave them in place."""
    before = _INDEXES.get()
    if id(model) in before:
        yield
        return
    called = _find_modules(model)
    index = _ModuleIndex(model, called, _unwrap_all(called), {})
    token = _INDEXES.set({**before, id(model): index})
    index.tensors = _named_tensors(model)
    try:
        yield
    finally:
        _INDEXES.reset(token)


P = ParamSpec("P")
R = TypeVar("R")


def with_cached_modules(
    call: Callable[Concatenate[nn.Module, P], R],
) -> Callable[Concatenate[nn.Module, P], R]:
    """Decorate a function so that it looks up its model's modules only once."""

    @wraps(call)
    def wrapper(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given: Any = model
        is_model = isinstance(given, nn.Module)  # otherwise the function itself raises an error
        with cache_modules(unwrap_model(model)) if is_model else nullcontext():
            return call(model, *args, **kwargs)

    return wrapper


def _find_modules(model: nn.Module) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    seen: set[int] = set()
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modules[path] = module
        children = (unwrap(module) if isinstance(module, Adapted) else module)._modules
        if children:
            prefix = f"{path}." if path else ""
            below = [(prefix + name, c) for name, c in children.items() if c is not None]
            pending += below[::-1]
    return modules


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, including wrappers and their adapters."""
    modules = []
    for module in outer_modules_by_path(model).values():
        modules.append(module)
        if isinstance(module, Adapted):
            modules += [part for part in module._modules.values() if part is not None]
    return modules


def module_at(model: nn.Module, path: str) -> nn.Module:
    """Return the user's own module at a path, without the wrapper that may be around it."""
    return unwrap(model.get_submodule(path))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their first name; tied ones appear once."""
    index = _INDEXES.get().get(id(model))
    return _named_tensors(model) if index is None else dict(index.tensors)


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    modules = modules_by_path(model)
    for tables in (
        [(path, module._parameters) for path, module in modules.items()],
        [(path, module._buffers) for path, module in modules.items()],
    ):
        for path, table in tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    named[f"{path}.{name}" if path else name] = tensor
    return named


@contextmanager
def keep_tied_buffers(model: nn.Module) -> Iterator[None]:
    """Keep a buffer with several names one tensor while the body casts or moves the model.

    Torch does so for parameters only.
    """
    names: dict[int, list[tuple[dict[str, Tensor | None], str]]] = {}
    for module in modules_by_path(model).values():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                names.setdefault(id(buffer), []).append((module._buffers, name))
    yield
    for (table, name), *others in names.values():
        for other_table, other in others:
            other_table[other] = table[name]


def overlapping_tensors(model: nn.Module) -> list[tuple[Tensor, str]]:
    """List tensors that share memory with another that is not the same object, and its name.

    A parameter made of another's data (`nn.Parameter(a.weight.data.view(16, 16))`) is tied to it
    for as long as nobody moves or copies the model. A slice of a compact model cannot be.
    """
    spans = [
        (start, stop, name, tensor)
        for name, tensor in named_tensors(model).items()
        for start, stop in _span(tensor)
    ]
    spans.sort(key=lambda span: span[:2])
    shared: list[tuple[Tensor, str]] = []
    end, widest, first = 0, None, ""
    for start, stop, name, tensor in spans:
        if widest is not None and start < end:
            shared += [(tensor, first), (widest, name)]
        if stop > end:
            end, widest, first = stop, tensor, name
    return shared


def _span(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield where a tensor's memory starts and ends, if it has any."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return
    reach = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    if start:
        yield start, start + (reach + 1) * tensor.element_size()


def replace_module_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module wherever the model stores it."""
    replace_modules_(model, {old: new})


def replace_modules_(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules wherever the model stores them.

    Also in attributes that torch does not register: lists, tuples and dicts of modules.
    """
    if not new:
        return
    successors = {id(old): module for old, module in new.items()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in successors:
                parent._modules[name] = successors[id(child)]
        for name, value in vars(parent).items():
            if name not in MODULE_ATTRIBUTES and isinstance(value, _CONTAINERS):
                vars(parent)[name] = _replace_in(value, successors)


MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""
_CONTAINERS = (nn.Module, list, tuple, dict)


def _replace_in(value: Any, new: Mapping[int, nn.Module]) -> Any:
    """Return a module's successor, or a list or dict with modules replaced in place."""
    if isinstance(value, nn.Module):
        return new.get(id(value), value)
    if type(value) is dict:
        value.update({key: new[id(item)] for key, item in value.items() if id(item) in new})
    elif type(value) is list and any(id(item) in new for item in value):
        value[:] = [new.get(id(item), item) for item in value]
    elif type(value) is tuple and any(id(item) in new for item in value):
        return tuple(new.get(id(item), item) for item in value)
    return value


_CALLS = {
    "Plan": "fpgm.compact(model, plan)",
    "str": "fpgm.save(model, path)",
    "Tensor": "fpgm.plan(model, example_inputs)",
}
"""A call as it should be, by the type of the argument that was given in the model's place."""


def check_module(model: object) -> None:
    """Refuse what is not a module, as when arguments are swapped."""
    if not isinstance(model, nn.Module):
        kind = "str" if isinstance(model, Path) else type(model).__name__
        hint = f"the torch.nn.Module first, as in {_CALLS[kind]}" if kind in _CALLS else None
        given = type(model).__name__
        raise RequestError(f"model is a {given}: give {hint or 'a torch.nn.Module'}.")


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's module inside DataParallel, DDP and torch.compile; refuse other objects."""
    check_module(model)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrap_model(model.module)
    if isinstance(model, torch.jit.ScriptModule):  # whose table of modules is of another kind
        return model
    inner = model._modules.get("_orig_mod")
    return model if inner is None else unwrap_model(inner)


def tensors_sha256(model: nn.Module) -> str:
    """Return a digest of a model's tensors, to recognize the original."""
    digest = hashlib.sha256()
    update_digest(digest, model.state_dict())
    return digest.hexdigest()


def update_digest(digest: hashlib._Hash, tensors: Mapping[str, Tensor]) -> None:
    """Update a digest with tensors: names, dtypes, shapes and values."""
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(values.data)
