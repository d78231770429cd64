"""Zeroing the units a plan removes, in place, in the full-size model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fpgm.compact import check_fits
from fpgm.plan import Plan
from fpgm.slicing import Gone
from fpgm.tensors import named_tensors

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
    check_fits(model, plan)
    silence_(model, plan, HELD if readers else SILENT)


def silence_(model: nn.Module, plan: Plan, roles: tuple[str, ...]) -> None:
    """Zero the removed slices that play one of these roles."""
    Silencer(model, plan, roles).weights_()


class Silencer:
    """The removed slices that play one of these roles, looked up once and zeroed many times."""

    def __init__(self, model: nn.Module, plan: Plan, roles: tuple[str, ...]) -> None:
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
        for tensor, gone in self.slices:
            gone.zero_(tensor)

    @torch.no_grad()
    def parameters_(self) -> None:
        """Zero the weights after a step; running means of silent units stay zero by themselves."""
        for parameter, slices in self.held.items():
            for gone in slices:
                gone.zero_(parameter)

    def gradient_hooks(self) -> list[RemovableHandle]:
        """Have gradients zeroed as they arrive, until the handles are removed."""
        return [
            parameter.register_post_accumulate_grad_hook(_zeroed(slices))
            for parameter, slices in self.held.items()
            if parameter.requires_grad
        ]

    @torch.no_grad()
    def momentum_(self, optimizer: torch.optim.Optimizer) -> None:
        """Zero what would move the weights even without a gradient."""
        for tensor, gone in self.slices:
            state = optimizer.state.get(tensor, {})
            for key in MOMENTUM:
                if isinstance(state.get(key), Tensor):
                    gone.zero_(state[key])


def _zeroed(slices: Sequence[Gone]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            for gone in slices:
                gone.zero_(parameter.grad)

    return hook
