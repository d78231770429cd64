"""Gathers and scatters of channels, attached to a module as hooks.

A compact model stays the user's own class. Where their code fixes a width that pruning changed
(zero-padded shortcuts, shuffles, full-width residual streams), a hook on the nearest module picks
or places channels. The positions are buffers, so they move between devices with the model; they
are rebuilt from the plan and not stored in state dicts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fpgm.plan import Adapter


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Pick channels."""
    return x.index_select(dim, index)


def scatter(x: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    """Place channels among zeros that lie in memory as they do (channels last, say).

    In another order both this and every layer after it would take about twice as long.
    """
    strides = x.stride()
    outermost_first = sorted(range(x.ndim), key=lambda d: -strides[d])
    zeros = x.new_zeros([size if d == dim else x.shape[d] for d in outermost_first])
    if outermost_first != sorted(outermost_first):
        zeros = zeros.permute([outermost_first.index(d) for d in range(x.ndim)])
    return zeros.index_copy_(dim, index, x)  # out of place, the zeros were copied too


def sources(adapter: Adapter) -> Tensor:
    """Where each place of a scatter gets its channel from; behind the last one are the zeros."""
    found = torch.full((adapter.size,), len(adapter.index))
    found[list(adapter.index)] = torch.arange(len(adapter.index))
    return found


def spread(x: Tensor, dim: int, origins: Tensor) -> Tensor:
    """Place channels among zeros by their `sources`.

    The same as `scatter` in one pass over what comes out, which compilers and other runtimes merge
    with what follows; its gradient would be the dearer one.
    """
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim).index_select(dim, origins)


_SOURCES = "_sources"


class _Hook:
    """Callable that finds its positions on the module it is attached to, so copies stay apart."""

    def __init__(self, adapter: Adapter, buffer: str) -> None:
        self.dim, self.size, self.kind, self.buffer = (
            adapter.dim, adapter.size, adapter.kind, buffer,
        )  # fmt: skip

    def adapt(self, module: nn.Module, x: Tensor) -> Tensor:
        index = getattr(module, self.buffer)
        if self.kind == "gather":
            return gather(x, self.dim, index)
        if torch.compiler.is_compiling() and not (torch.is_grad_enabled() and x.requires_grad):
            return spread(x, self.dim, getattr(module, self.buffer + _SOURCES))
        return scatter(x, self.dim, index, self.size)


class _InputHook(_Hook):
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.adapt(module, args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: self.adapt(module, kwargs[first])}


class _OutputHook(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return self.adapt(module, out)


def attach_(model: nn.Module, adapter: Adapter) -> None:
    """Register an adapter's hook and its positions on the module it names."""
    module = model.get_submodule(adapter.module)
    taken = sum(name.startswith("fpgm_") for name, _ in module.named_buffers(recurse=False))
    buffer = f"fpgm_{adapter.side}_{taken}"
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    index = torch.tensor(adapter.index, dtype=torch.int64, device=device)
    module.register_buffer(buffer, index, persistent=False)
    if adapter.kind == "scatter":
        module.register_buffer(buffer + _SOURCES, sources(adapter).to(device), persistent=False)
    if adapter.side == "input":
        module.register_forward_pre_hook(_InputHook(adapter, buffer), with_kwargs=True)
    else:
        module.register_forward_hook(_OutputHook(adapter, buffer))


def placing(module: nn.Module, path: str) -> Adapter | None:
    """The adapter that places a module's output, if nothing else is done with that output."""
    hooks = list(module._forward_hooks.values())
    if len(hooks) != 1 or not isinstance(hooks[0], _OutputHook) or hooks[0].kind != "scatter":
        return None
    hook = hooks[0]
    index = tuple(getattr(module, hook.buffer).tolist())
    return Adapter(path, "output", "scatter", hook.dim, index, hook.size)


def detach_(module: nn.Module) -> None:
    """Take the adapter from a module's output, and its positions."""
    (key,) = [k for k, hook in module._forward_hooks.items() if isinstance(hook, _OutputHook)]
    hook = module._forward_hooks.pop(key)
    assert isinstance(hook, _OutputHook)
    for name in (hook.buffer, hook.buffer + _SOURCES):
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
