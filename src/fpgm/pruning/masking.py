"""Mask the units a plan removes, in place, in the full-size model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fpgm.pruning.compaction import check_fits
from fpgm.pruning.plan import Plan
from fpgm.pruning.slicing import RemovedSlices
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.modules import named_tensors, unwrap_model
from fpgm.utils.weight_norm import rescale_gains

PRODUCER_ROLES = ("filter", "depthwise", "both", "gain", "shift")
"""Roles that produce a unit: with these at zero it is zero, as long as zero stays zero."""

MASKED_ROLES = (*PRODUCER_ROLES, "reads")
"""Roles to zero so that a unit has no effect, whatever the activation behind it."""


MOMENTUM = ("momentum_buffer", "exp_avg")
"""Where optimizers keep momentum."""


@cpu_by_default()
def mask_(model: nn.Module, plan: Plan, *, readers: bool = True) -> None:
    """Zero every slice of the removed units, so that the model computes what the compact one does.

    A norm's scale is not zeroed: with shift and running mean at zero, a zeroed filter stays zero,
    and with a scale of zero the filter would never receive a gradient again. With `readers=False`
    only the filters and shifts are zeroed, as the paper does between epochs; the two are the same
    when the activation maps zero to zero.
    """
    model = unwrap_model(model)
    check_fits(model, plan)
    zero_removed_(model, plan, MASKED_ROLES if readers else PRODUCER_ROLES)


def zero_removed_(model: nn.Module, plan: Plan, roles: tuple[str, ...]) -> None:
    """Zero the removed slices that have one of these roles."""
    SliceMasker(model, plan, roles).weights_()


class SliceMasker:
    """Zeroes the removed slices that have one of these roles; looks them up once."""

    def __init__(self, model: nn.Module, plan: Plan, roles: tuple[str, ...]) -> None:
        self.model = model
        tensors = named_tensors(model)
        self.slices = [
            (tensor := tensors[c.tensor], RemovedSlices.of(c, tensor))
            for c in plan.cuts
            if c.role in roles
        ]
        self.held: dict[nn.Parameter, list[RemovedSlices]] = {}
        """The parameters among them, which an optimizer may change."""
        for tensor, removed in self.slices:
            if isinstance(tensor, nn.Parameter):
                self.held.setdefault(tensor, []).append(removed)

    @torch.no_grad()
    def weights_(self) -> None:
        """Zero the weights, and norms' running means."""
        with rescale_gains(self.model, (tensor for tensor, _ in self.slices)):
            for tensor, removed in self.slices:
                removed.zero_(tensor)

    def hold(self, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Keep the units at zero while an optimizer trains, until the handles are removed.

        Gradients are zeroed as they arrive, before gradient clipping; gradients that were assigned
        directly are zeroed before the step, and the weights after it. Running means stay zero where
        a norm reads only zeros, and are not used elsewhere.
        """
        arrived: set[int] = set()

        @torch.no_grad()
        def before(*_: Any) -> None:
            for parameter, slices in self.held.items():
                if id(parameter) not in arrived and parameter.grad is not None:
                    for removed in slices:
                        removed.zero_(parameter.grad)
            arrived.clear()

        @torch.no_grad()
        def after(*_: Any) -> None:
            for parameter, slices in self.held.items():
                for removed in slices:
                    removed.zero_(parameter)

        handles: list[RemovableHandle] = [
            _add_gradient_hook(parameter, _zero_gradient(slices, arrived))
            for parameter, slices in self.held.items()
        ]
        handles.append(optimizer.register_step_pre_hook(before))
        handles.append(optimizer.register_step_post_hook(after))
        return handles

    @torch.no_grad()
    def momentum_(self, optimizer: torch.optim.Optimizer) -> None:
        """Zero the momentum, which would change the weights even without a gradient."""
        for tensor, removed in self.slices:
            state = optimizer.state.get(tensor, {})
            for key in MOMENTUM:
                if isinstance(state.get(key), Tensor):
                    removed.zero_(state[key])


def _zero_gradient(slices: Sequence[RemovedSlices], arrived: set[int]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        arrived.add(id(parameter))
        grad = parameter.grad
        if grad is None:
            return
        if grad.requires_grad:  # backward(create_graph=True): zeroing is not part of the graph
            grad = grad.detach()
        for removed in slices:
            removed.zero_(grad)

    return hook


def _add_gradient_hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Add a gradient hook; torch requires that the parameter is trainable at that moment."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trained)
    return handle
