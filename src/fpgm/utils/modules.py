"""A model's modules, parameters and buffers by name, and the model inside its wrappers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fpgm.utils.channel_adapters import Adapted, unwrap


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return the user's own modules under the names the original model has for them.

    As `dict(model.named_modules())`, without a generator for every level above every module, and
    without wrappers that move channels: the module inside has its path.
    """
    walk = _WALKS.get().get(id(model))
    return _unwrapped(_walk(model)) if walk is None else dict(walk.modules)


def called_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return what the user's code calls under each name: modules, or the wrappers around them."""
    walk = _WALKS.get().get(id(model))
    return _walk(model) if walk is None else dict(walk.called)


def _unwrapped(called: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        path: unwrap(module) if isinstance(module, Adapted) else module
        for path, module in called.items()
    }


@dataclass
class _Walk:
    """What a walk over a model's modules found."""

    model: nn.Module
    called: dict[str, nn.Module]
    modules: dict[str, nn.Module]
    tensors: dict[str, Tensor]


_WALKS: ContextVar[Mapping[int, _Walk]] = ContextVar("walks", default={})  # noqa: B039


@contextmanager
def walk_once(model: nn.Module) -> Iterator[None]:
    """Look a model's modules and tensors up once; nothing inside may give it others for good."""
    before = _WALKS.get()
    if id(model) in before:
        yield
        return
    called = _walk(model)
    walk = _Walk(model, called, _unwrapped(called), {})
    token = _WALKS.set({**before, id(model): walk})
    walk.tensors = _named_tensors(model)
    try:
        yield
    finally:
        _WALKS.reset(token)


P = ParamSpec("P")
R = TypeVar("R")


def walks_once(
    call: Callable[Concatenate[nn.Module, P], R],
) -> Callable[Concatenate[nn.Module, P], R]:
    """Decorate a function so that it looks the modules of its model up once."""

    @wraps(call)
    def walking(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given: Any = model
        is_model = isinstance(given, nn.Module)  # else the function says what is wrong
        with walk_once(unwrapped(model)) if is_model else nullcontext():
            return call(model, *args, **kwargs)

    return walking


def _walk(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found[path] = module
        children = (unwrap(module) if isinstance(module, Adapted) else module)._modules
        if children:
            prefix = f"{path}." if path else ""
            below = [(prefix + name, c) for name, c in children.items() if c is not None]
            waiting += below[::-1]
    return found


def every_module(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, wrappers and what they do included."""
    found = []
    for module in called_by_path(model).values():
        found.append(module)
        if isinstance(module, Adapted):
            found += [part for part in module._modules.values() if part is not None]
    return found


def module_at(model: nn.Module, path: str) -> nn.Module:
    """Return the user's own module at a path, without the wrapper that may be around it."""
    return unwrap(model.get_submodule(path))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their first name; tied ones appear once."""
    walk = _WALKS.get().get(id(model))
    return _named_tensors(model) if walk is None else dict(walk.tensors)


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


def replace_module_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever the model holds that one."""
    replace_modules_(model, {old: new})


def replace_modules_(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules in the place of others, wherever the model holds those.

    Also in attributes that torch does not know for modules: lists, tuples and dicts of them.
    """
    if not new:
        return
    successors = {id(old): module for old, module in new.items()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in successors:
                parent._modules[name] = successors[id(child)]
        for name, value in vars(parent).items():
            if name not in TABLES and isinstance(value, _HOLDERS):
                vars(parent)[name] = _replaced(value, successors)


TABLES = frozenset(nn.Module().__dict__)
"""What every module holds: tables of its own that nothing else shares."""
_HOLDERS = (nn.Module, list, tuple, dict)


def _replaced(value: Any, new: Mapping[int, nn.Module]) -> Any:
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


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside DataParallel, DDP and torch.compile, whose names carry a prefix."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrapped(model.module)
    if isinstance(model, torch.jit.ScriptModule):  # whose table of modules is of another kind
        return model
    inner = model._modules.get("_orig_mod")
    return model if inner is None else unwrapped(inner)


def tensors_sha256(model: nn.Module) -> str:
    """Digest of a model's tensors, by which an original is known again."""
    digest = hashlib.sha256()
    add_tensors(digest, model.state_dict())
    return digest.hexdigest()


def add_tensors(digest: hashlib._Hash, tensors: Mapping[str, Tensor]) -> None:
    """Let a digest take in tensors: names, kinds, shapes and values."""
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(values.data)
