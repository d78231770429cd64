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
    """Place channels among zeros."""
    shape = list(x.shape)
    shape[dim] = size
    return x.new_zeros(shape).index_copy_(dim, index, x)  # out of place, the zeros were copied too


def spread(x: Tensor, dim: int, sources: Tensor) -> Tensor:
    """Place channels among zeros by where each place gets its own from; the last one is the zeros'.

    The same as `scatter` in one pass over what comes out, which compilers and other runtimes merge
    with what follows; its gradient would be the dearer one.
    """
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim).index_select(dim, sources)


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
        sources = torch.full((adapter.size,), len(index), device=device)
        sources[index] = torch.arange(len(index), device=device)
        module.register_buffer(buffer + _SOURCES, sources, persistent=False)
    if adapter.side == "input":
        module.register_forward_pre_hook(_InputHook(adapter, buffer), with_kwargs=True)
    else:
        module.register_forward_hook(_OutputHook(adapter, buffer))
