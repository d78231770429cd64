"""Zeroing the units a plan removes, in place, in the full-size model."""

from __future__ import annotations

import torch
from torch import nn

from fpgm.compact import check_fits
from fpgm.plan import Plan
from fpgm.slicing import by_tensor, zero_
from fpgm.tensors import named_tensors

SILENT = ("filter", "depthwise", "both", "gain", "shift")
"""What writes a unit: with these at zero it is silent, wherever zero stays zero."""

HELD = (*SILENT, "reads")
"""All that is left of a unit that must not matter, whatever the activation behind it."""


@torch.no_grad()
def mask_(model: nn.Module, plan: Plan, *, readers: bool = True) -> None:
    """Zero every slice of the removed units, so that the model computes what the compact one does.

    A norm's scale is left alone: its shift and running mean already silence a zeroed filter, and
    zeroing the scale too would cut the filter off from its gradient for good. With
    `readers=False` only the filters and shifts are zeroed, as the paper does between epochs;
    the two are the same when the activation maps zero to zero.
    """
    check_fits(model, plan)
    silence_(model, plan, HELD if readers else SILENT)


@torch.no_grad()
def silence_(model: nn.Module, plan: Plan, roles: tuple[str, ...]) -> None:
    """Zero the removed slices that play one of these roles."""
    tensors = named_tensors(model)
    for name, cuts in by_tensor(plan.cuts).items():
        for c in cuts:
            if c.role in roles:
                zero_(tensors[name], c)


@torch.no_grad()
def silence_gradients_(model: nn.Module, plan: Plan, roles: tuple[str, ...]) -> None:
    """Zero the gradients of the removed slices that play one of these roles."""
    tensors = named_tensors(model)
    for name, cuts in by_tensor(plan.cuts).items():
        gradient = tensors[name].grad
        if gradient is not None:
            for c in cuts:
                if c.role in roles:
                    zero_(gradient, c)
