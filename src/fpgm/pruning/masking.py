"""Zeroing the units a plan removes, in place, in the full-size model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fpgm.pruning.compaction import check_fits
from fpgm.pruning.plan import Plan
from fpgm.pruning.slicing import Gone
from fpgm.utils.modules import named_tensors, unwrapped
from fpgm.utils.weight_norm import gains_follow

SILENT = ("filter", "depthwise", "both", "gain", "shift")
"""What writes a unit: with these at zero it is silent, wherever zero stays zero."""

HELD = (*SILENT, "reads")
"""All that is left of a unit that must not matter, whatever the activation behind it."""


MOMENTUM = ("momentum_buffer", "exp_avg")
"""Where optimizers keep what moves a weight on."""


def mask_(model: nn.Module, plan: Plan, *, readers: bool = True) -> None:
    """Zero every slice of the removed units, so that the model computes what the compact one does.

    A norm's scale is left alone: its shift and running mean already silence a zeroed filter, and
    zeroing the scale too would cut the filter off from its gradient for good. With
    `readers=False` only the filters and shifts are zeroed, as the paper does between epochs;
    the two are the same when the activation maps zero to zero.
    """
    model = unwrapped(model)
    check_fits(model, plan)
    silence_(model, plan, HELD if readers else SILENT)


def silence_(model: nn.Module, plan: Plan, roles: tuple[str, ...]) -> None:
    """Zero the removed slices that play one of these roles."""
    Silencer(model, plan, roles).weights_()


class Silencer:
    """The removed slices that play one of these roles, looked up once and zeroed many times."""

    def __init__(self, model: nn.Module, plan: Plan, roles: tuple[str, ...]) -> None:
        self.model = model
        tensors = named_tensors(model)
        self.slices = [
            (tensor := tensors[c.tensor], Gone.of(c, tensor)) for c in plan.cuts if c.role in roles
        ]
        self.held: dict[nn.Parameter, list[Gone]] = {}
        """The parameters among them: what an optimizer may move."""
        for tensor, gone in self.slices:
            if isinstance(tensor, nn.Parameter):
                self.held.setdefault(tensor, []).append(gone)

    @torch.no_grad()
    def weights_(self) -> None:
        """Zero the weights, and norms' running means."""
        with gains_follow(self.model, (tensor for tensor, _ in self.slices)):
            for tensor, gone in self.slices:
                gone.zero_(tensor)

    def hold(self, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Keep the units at zero while an optimizer trains, until the handles are removed.

        Gradients are zeroed as they arrive, before anybody clips them; those that did not arrive
        but were put there, before the step; and the weights after it. Running means stay zero by
        themselves where a norm reads nothing but zeros, and elsewhere nobody reads them.
        """
        arrived: set[int] = set()

        @torch.no_grad()
        def before(*_: Any) -> None:
            for parameter, slices in self.held.items():
                if id(parameter) not in arrived and parameter.grad is not None:
                    for gone in slices:
                        gone.zero_(parameter.grad)
            arrived.clear()

        @torch.no_grad()
        def after(*_: Any) -> None:
            for parameter, slices in self.held.items():
                for gone in slices:
                    gone.zero_(parameter)

        handles: list[RemovableHandle] = [
            _hooked(parameter, _zeroed(slices, arrived)) for parameter, slices in self.held.items()
        ]
        handles.append(optimizer.register_step_pre_hook(before))
        handles.append(optimizer.register_step_post_hook(after))
        return handles

    @torch.no_grad()
    def momentum_(self, optimizer: torch.optim.Optimizer) -> None:
        """Zero what would move the weights even without a gradient."""
        for tensor, gone in self.slices:
            state = optimizer.state.get(tensor, {})
            for key in MOMENTUM:
                if isinstance(state.get(key), Tensor):
                    gone.zero_(state[key])


def _zeroed(slices: Sequence[Gone], arrived: set[int]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        arrived.add(id(parameter))
        grad = parameter.grad
        if grad is None:
            return
        if grad.requires_grad:  # backward(create_graph=True): zeroing is no part of the graph
            grad = grad.detach()
        for gone in slices:
            gone.zero_(grad)

    return hook


def _hooked(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Hook a parameter that may be frozen now and trained later: torch wants it trainable."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trained)
    return handle
