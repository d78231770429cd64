"""Weights that torch's own hooks compute before each forward and keep in a plain attribute.

`torch.nn.utils.weight_norm` and `torch.nn.utils.prune` do this. Such an attribute is not a cached
activation, and after pruning it is computed again from the sliced parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from fpgm.utils.modules import modules_by_path


def weight_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Find the hooks that compute a weight of this module, each with the weight's name."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield hook.name, hook
        elif isinstance(hook, BasePruningMethod):
            yield hook._tensor_name, hook


def compute_weights_(model: nn.Module) -> None:
    """Compute every such weight from its parameters, as the next forward would."""
    for module in modules_by_path(model).values():
        for _, hook in weight_hooks(module):
            with torch.no_grad():
                hook(module, None)
