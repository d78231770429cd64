"""Move an optimizer to the compact model: its state is sliced like the weights.

The optimizer object stays the same, so schedulers that refer to it keep working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.pruning.plan import Cut, Plan
from fpgm.pruning.slicing import by_tensor, cut
from fpgm.utils.modules import named_tensors


def move_optimizer_(
    optimizer: torch.optim.Optimizer, model: nn.Module, small: nn.Module, plan: Plan
) -> None:
    """Move an optimizer of the model to the compact model, with its state.

    If anything does not fit, nothing is changed.
    """
    check_optimizer(optimizer, model)
    optimizer = inner_optimizer(optimizer)
    old, new = named_tensors(model), named_tensors(small)
    names = {id(tensor): name for name, tensor in old.items()}
    cuts = by_tensor(plan.cuts)
    groups = [[new[names[id(p)]] for p in group["params"]] for group in optimizer.param_groups]
    states = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        states[new[name]] = {
            key: _cut_state(name, key, value, parameter, new[name], cuts)
            for key, value in state.items()
        }
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = params
    optimizer.state.clear()
    optimizer.state.update(states)


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the actual optimizer inside a wrapper such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return inner_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise if an optimizer holds anything but this model's parameters."""
    known = {id(tensor) for tensor in named_tensors(model).values()}
    optimizer = inner_optimizer(optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in (*held, *optimizer.state):
        if id(parameter) not in known:
            raise RequestError(
                f"The optimizer holds a parameter of shape {list(parameter.shape)} that is not the "
                "model's: give the optimizer of this model."
            )


def _cut_state(
    name: str,
    key: str,
    value: Any,
    parameter: Tensor,
    successor: Tensor,
    cuts: Mapping[str, Sequence[Cut]],
) -> Any:
    """Cut one entry of the optimizer's state like the parameter it belongs to.

    Args:
        name: Name of the parameter.
        key: Name of the entry, such as "momentum_buffer".
        value: The entry; only tensors with dims are cut.
        parameter: The parameter before pruning.
        successor: The parameter of the compact model.
        cuts: The plan's cuts by parameter name.
    """
    if not isinstance(value, Tensor) or value.ndim == 0 or name not in cuts:
        return value.clone() if isinstance(value, Tensor) else value
    if value.shape != parameter.shape:
        raise RequestError(
            f"The optimizer's '{key}' for '{name}' has shape {list(value.shape)}, the parameter "
            f"{list(parameter.shape)}: such state cannot be sliced; create a new optimizer."
        )
    # In the new parameter's memory layout: fused optimizers pair the two by memory position.
    return torch.empty_like(successor, dtype=value.dtype).copy_(cut(value, cuts[name]))
