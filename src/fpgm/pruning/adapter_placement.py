"""Insert a plan's gathers and scatters into a model: which layer is wrapped, and with what.

The wrappers are in `utils.channel_adapters`. The adapters of a plan replace those that an earlier
plan gave the same layer on the same side.
"""

from __future__ import annotations

import torch
from torch import nn

from fpgm.errors import PlanError
from fpgm.utils.adapter_spec import Adapter, Side
from fpgm.utils.channel_adapters import (
    Adapted,
    Gather,
    Scatter,
    adapters_of,
    buffer_names,
    unwrap,
    wrap,
)
from fpgm.utils.modules import replace_module_, replace_modules_

_ATTRIBUTE: dict[Side, str] = {"input": "before", "output": "after"}


def attach_(model: nn.Module, *adapters: Adapter) -> None:
    """Wrap the modules that a plan's adapters name, wherever the model stores them."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    wrappers: dict[str, Adapted] = {}
    new: dict[nn.Module, nn.Module] = {}
    done: dict[tuple[str, Side], Adapter] = {}
    for adapter in adapters:
        if adapter.module not in wrappers:
            module = model.get_submodule(adapter.module)
            wrappers[adapter.module] = module if isinstance(module, Adapted) else wrap(module)
            if not isinstance(module, Adapted):
                new[module] = wrappers[adapter.module]
        place = (adapter.module, adapter.side)
        if place in done:
            adapter = join(done[place], adapter)
        done[place] = adapter
        _set(wrappers[adapter.module], adapter, device)
    replace_modules_(model, new)


def join(first: Adapter, second: Adapter) -> Adapter:
    """Merge two consecutive gathers into one; nothing else can be merged.

    >>> first = Adapter("a", "output", "gather", 1, (3, 5), 8)
    >>> join(first, Adapter("a", "output", "gather", 1, (1,), 2))
    Adapter(module='a', side='output', kind='gather', dim=1, index=(5,), size=8)
    """
    picks = first.kind == second.kind == "gather" and first.dim == second.dim
    if not picks or not all(i < len(first.index) for i in second.index):
        raise PlanError(f"The plan is damaged: it has two adapters for '{first.module}'.")
    index = tuple(first.index[i] for i in second.index)
    return Adapter(first.module, first.side, "gather", first.dim, index, first.size)


def adapter_at(model: nn.Module, path: str, side: Side) -> Adapter | None:
    """Return the adapter at one side of a module."""
    adapters = adapters_of(model.get_submodule(path), path)
    return next((adapter for _, adapter in adapters if adapter.side == side), None)


def output_scatter(model: nn.Module, path: str) -> Adapter | None:
    """Return the adapter that places a module's output, if nothing else is done with that output.

    A user's hook between the module and the scatter could do anything.
    """
    adapter, module = adapter_at(model, path, "output"), model.get_submodule(path)
    if adapter is None or adapter.kind != "scatter":
        return None
    hooked = module._forward_hooks or module._forward_pre_hooks or unwrap(module)._forward_hooks
    return None if hooked else adapter


def detach_(model: nn.Module, path: str) -> None:
    """Remove the adapter at a module's output."""
    wrapper = model.get_submodule(path)
    assert isinstance(wrapper, Adapted)
    wrapper.after = None
    if wrapper.before is None:
        replace_module_(model, wrapper, wrapper.base_layer)


def _set(wrapper: Adapted, adapter: Adapter, device: torch.device) -> None:
    """Set a wrapper's adapter on one side."""
    name = _ATTRIBUTE[adapter.side]
    before = getattr(wrapper, name)
    number = len(buffer_names(wrapper)) if before is None else before.number
    index = torch.tensor(adapter.index, dtype=torch.int64, device=device)
    kind = Gather if adapter.kind == "gather" else Scatter
    new_adapter = kind(adapter.dim, index, adapter.size, number)
    setattr(wrapper, name, new_adapter.train(wrapper.training))
