"""A second opinion on plans, written apart from `fpgm.verify`.

The full-size model runs with noise in place of every removed filter and with zeros where a layer
reads a removed channel. Only a plan that reads nothing it removes is left unmoved by the noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fpgm
from fpgm.pruning.plan import Cut
from fpgm.utils.modules import named_tensors
from fpgm.utils.parameter_roles import layer_of


class Layers(nn.Module):
    """Layers by name, and a forward pass of its own."""

    def __init__(self, run: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def conv(inputs: int, outputs: int, kernel: int = 1, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def kept(plan: fpgm.Plan) -> dict[str, int]:
    """Units that stay, by group."""
    return {group.name: group.kept for group in plan.groups}


def plan_of(net: nn.Module, x: Any, **options: Any) -> fpgm.Plan:
    """Plan half of every group, without rounding."""
    return fpgm.plan(net, x, **{"rate": 0.5, "align": 1, **options})


@torch.no_grad()
def reference(net: nn.Module, plan: fpgm.Plan) -> nn.Module:
    """Copy a model: noise in what is removed, zeros where it is read."""
    full = _without_weight_norm(copy.deepcopy(net))
    tensors = named_tensors(full)
    generator = torch.Generator().manual_seed(7)
    for cut in plan.cuts:
        if cut.tensor.endswith(("weight_g", "parametrizations.weight.original0")):
            continue
        tensor, reads = _weight(full, cut) if cut.tensor not in tensors else (None, False)
        tensor = tensors[cut.tensor] if tensor is None else tensor
        if not tensor.is_floating_point() or tensor.shape[cut.dim] == 1:
            continue
        rows = tensor.shape[0] // cut.blocks
        for block in range(cut.blocks):
            part = tensor[block * rows : (block + 1) * rows] if cut.blocks > 1 else tensor
            places = torch.tensor(cut.removed(block), dtype=torch.int64)
            old = part.index_select(cut.dim, places)
            noise = torch.rand(old.shape, generator=generator).to(old) + 0.3
            new = torch.zeros_like(old) if reads or cut.role in ("reads", "both") else noise
            part.index_copy_(cut.dim, places, new)
    return full


def assert_exact(
    net: nn.Module, plan: fpgm.Plan, *inputs: Any, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """Check compact and masked model against the reference; returns the compact one."""
    net = copy.deepcopy(net).to(dtype).eval()
    near = 1e-9 if dtype == torch.float64 else 1e-5
    full, small, masked = reference(net, plan), fpgm.compact(net, plan), copy.deepcopy(net)
    fpgm.mask_(masked, plan)
    for x in inputs:
        args = tuple(_as(t, dtype) for t in (x if isinstance(x, Sequence) else (x,)))
        want, have, zeroed = (model(*args) for model in (full, small, masked))
        assert bool(want.isfinite().all())
        torch.testing.assert_close(have, want, rtol=near, atol=near)
        torch.testing.assert_close(zeroed, want, rtol=near, atol=near)
        assert (want - net(*args)).abs().max() > 1e-6, "nothing was removed that matters"
    return small


def _weight(full: nn.Module, cut: Cut) -> tuple[Tensor, bool]:
    """The weight that a weight norm's direction makes, and whether it reads along the cut."""
    module = full.get_submodule(layer_of(cut.tensor))
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight, cut.dim == (0 if getattr(module, "transposed", False) else 1)


def _without_weight_norm(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if parametrize.is_parametrized(module, "weight"):
            if hasattr(module.parametrizations.weight, "original1"):  # type: ignore[union-attr]
                kind = type(module)  # copies share it, and removing takes the property off it
                module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
                parametrize.remove_parametrizations(module, "weight")
        elif hasattr(module, "weight_g"):
            nn.utils.remove_weight_norm(module)
    return net


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
