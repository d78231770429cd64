"""The reference a compact model is checked against: the full-size model, removed units masked.

Every consumer ignores the removed units; where the compact model scatters among zeros, the same
channels are zeroed. For an approximate plan, norms compute their statistics over the kept channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fpgm.pruning.compaction import rebuild
from fpgm.pruning.masking import zero_removed_
from fpgm.pruning.plan import Cut, Plan
from fpgm.pruning.slicing import RemovedSlices, by_tensor
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.channel_adapters import unwrap
from fpgm.utils.copying import copy_model
from fpgm.utils.modules import named_tensors
from fpgm.utils.weight_norm import rescale_gains


def masked_copy(model: nn.Module, plan: Plan) -> nn.Module:
    """Return a copy in which every consumer ignores the removed units."""
    masked = copy_model(model)
    ignore_removed_(masked, plan)
    for adapter in plan.adapters:
        if adapter.kind == "scatter":
            _zero_scattered_(masked, adapter)
    return masked


def ignore_removed_(model: nn.Module, plan: Plan) -> None:
    """Zero the removed units wherever a weight reads them."""
    zero_removed_(model, plan, ("reads", "both"))


def _zero_scattered_(model: nn.Module, adapter: Adapter) -> None:
    """Zero the channels that are zero where the compact model scatters."""
    module = model.get_submodule(adapter.module)
    if adapter.side == "input":
        module = unwrap(module)  # widened to full width by an earlier adapter
    removed = torch.tensor(sorted(set(range(adapter.size)) - set(adapter.index)))

    def zero(x: Tensor) -> Tensor:
        return x.index_fill(adapter.dim, removed.to(x.device), 0)

    # Never removed, for the model is our own copy and is not the same without it.
    if adapter.side == "input":
        module.register_forward_pre_hook(lambda _, args: (zero(args[0]), *args[1:]))
    else:
        module.register_forward_hook(lambda _, args, out: zero(out))


def norms_over_kept(reference: nn.Module, plan: Plan) -> AbstractContextManager[object]:
    """Compute norms over the kept channels only, if the plan is approximate."""
    return nullcontext() if plan.exact else _KeptNorms(reference, plan)


class _KeptNorms(TorchDispatchMode):
    """Runs LayerNorms, and the standardization of weights, on the kept channels only."""

    supports_higher_order_operators = True

    def __init__(self, reference: nn.Module, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = named_tensors(reference)
        self.scales = {id(tensors[c.tensor]): c for c in plan.cuts if c.role == "scale"}
        self.reads = {id(tensors[c.tensor]): c for c in plan.cuts if c.role == "reads"}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = "" if isinstance(func, HigherOrderOperator) else func._schema.name
        if name == "aten::native_layer_norm" and id(args[2]) in self.scales:
            return self._layer_norm(func, *args)
        if name == "aten::native_batch_norm" and id(args[0]._base) in self.reads:
            return self._standardise(func, self.reads[id(args[0]._base)], *args)
        return func(*args, **(kwargs or {}))

    def _layer_norm(
        self, func: Any, x: Tensor, _: Any, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, ...]:
        """Run `aten.native_layer_norm`, whose arguments these are, over the kept channels only."""
        keep = torch.tensor(self.scales[id(weight)].keep, device=x.device)
        shift = None if bias is None else bias[keep]
        out, mean, rstd = func(x.index_select(-1, keep), [len(keep)], weight[keep], shift, eps)
        return x.new_zeros(x.shape).index_copy(-1, keep, out), mean, rstd

    def _standardise(self, func: Any, c: Cut, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Standardize [1, filters, inputs · kernel] over the kept inputs; the others get zero."""
        kernel = torch.arange(x.shape[2] // c.size, device=x.device)
        inputs = torch.tensor(c.keep, device=x.device)
        keep = (inputs[:, None] * len(kernel) + kernel).reshape(-1)
        out, mean, rstd = func(x.index_select(2, keep), *rest)
        return x.new_zeros(x.shape).index_copy(2, keep, out), mean, rstd


@torch.no_grad()
def randomize_removed_(model: nn.Module, plan: Plan) -> None:
    """Fill zeros in removed units with noise: masking zeros would not change the outputs.

    The compact model does not contain these units, so it is not affected.
    """
    tensors = named_tensors(model)
    with rescale_gains(model, (tensors[c.tensor] for c in plan.cuts)):
        _fill_with_noise_(tensors, plan)


def _fill_with_noise_(tensors: Mapping[str, Tensor], plan: Plan) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, cuts in by_tensor(plan.cuts).items():
        tensor = tensors[name]
        if not tensor.is_floating_point() or bool((tensor != 0).all()):
            continue
        stays = torch.ones_like(tensor, dtype=torch.bool)
        for c in cuts:
            RemovedSlices.of(c, tensor).zero_(stays)
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        if any(c.role == "scale" for c in cuts):  # may be a variance
            noise = noise.abs() + 0.5
        else:
            noise *= float(tensor.abs().mean())
        tensor.copy_(torch.where(stays | (tensor != 0), tensor, noise))


@torch.no_grad()
def copy_kept_weights_(small: nn.Module, plan: Plan, model: nn.Module) -> None:
    """Copy the weights that the plan keeps into a compact model."""
    tensors = named_tensors(small)
    for name, value in named_tensors(rebuild(model, plan)).items():
        if value.is_floating_point() or value.is_complex():
            tensors[name].copy_(value)


class WeightComparison(NamedTuple):
    """How a compact model's parameters compare with the kept part of the original's."""

    comparable: bool
    """Whether it has every parameter the plan leaves, in its shape."""
    changed: str
    """The first one that holds other values, if any."""


@torch.no_grad()
def compare_weights(model: nn.Module, small: nn.Module, plan: Plan) -> WeightComparison:
    """Compare a compact model's weights with those the plan keeps."""
    tensors = named_tensors(small)
    changed = ""
    for name, expected in named_tensors(rebuild(model, plan)).items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != expected.shape:
            return WeightComparison(False, changed)
        if isinstance(expected, nn.Parameter) and not changed and not _equal(tensor, expected):
            changed = name
    return WeightComparison(True, changed)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Tell whether all values are equal; denormal numbers may have become zero."""
    if a.dtype == b.dtype and torch.equal(a, b):
        return True
    if a.dtype != b.dtype or not a.is_floating_point():
        return False
    tiny = torch.finfo(a.dtype).tiny
    return bool(((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= tiny)).all())
