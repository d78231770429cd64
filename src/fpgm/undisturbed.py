"""Running a model only to look at it: what a forward pass changes is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fpgm.tensors import modules_by_path
from fpgm.turns import TURN


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore mode, buffers and random state afterwards; one thread at a time."""
    with TURN:
        modules = modules_by_path(model).values()
        modes = [(module, module.training) for module in modules]
        tables = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        try:
            with torch.random.fork_rng():
                yield
        finally:
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for module, name, buffer, value in tables:
                    module._buffers[name] = buffer  # forward may have put another in its place
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


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
