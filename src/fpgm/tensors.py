"""A model's modules, parameters and buffers by name, and the model inside its wrappers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """`dict(model.named_modules())`, without a generator for every level above every module."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found[path] = module
        prefix = f"{path}." if path else ""
        children = list(module._modules.items())
        waiting += [(prefix + name, c) for name, c in reversed(children) if c is not None]
    return found


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their first name; tied ones appear once."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    modules = [(f"{p}." if p else "", m) for p, m in modules_by_path(model).items()]
    for table in ("_parameters", "_buffers"):
        for prefix, module in modules:
            for name, tensor in getattr(module, table).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    named[prefix + name] = tensor
    return named


def replace_module_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever the model holds that one."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


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
