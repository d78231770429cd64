"""The reference a compact model is checked against: the full-size model, removed units masked.

Every reader ignores the removed units; where the compact model scatters among zeros, the same
channels are zeroed. For an approximate plan, norms take their statistics over what is kept.
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
from fpgm.pruning.masking import silence_
from fpgm.pruning.plan import Cut, Plan
from fpgm.pruning.slicing import Gone, by_tensor
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.channel_adapters import unwrap
from fpgm.utils.copying import copy_model
from fpgm.utils.modules import named_tensors
from fpgm.utils.weight_norm import gains_follow


def silenced(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy in which every reader ignores the removed units."""
    quiet = copy_model(model)
    ignore_removed_(quiet, plan)
    for adapter in plan.adapters:
        if adapter.kind == "scatter":
            _silence_at_(quiet, adapter)
    return quiet


def ignore_removed_(model: nn.Module, plan: Plan) -> None:
    """Zero the removed units wherever a weight reads them."""
    silence_(model, plan, ("reads", "both"))


def _silence_at_(model: nn.Module, adapter: Adapter) -> None:
    """Where the compact model scatters among zeros, the reference zeroes the same channels."""
    module = model.get_submodule(adapter.module)
    if adapter.side == "input":
        module = unwrap(module)  # which an earlier adapter has given the full width
    gone = torch.tensor(sorted(set(range(adapter.size)) - set(adapter.index)))

    def zero(x: Tensor) -> Tensor:
        return x.index_fill(adapter.dim, gone.to(x.device), 0)

    if adapter.side == "input":
        module.register_forward_pre_hook(lambda _, args: (zero(args[0]), *args[1:]))
    else:
        module.register_forward_hook(lambda _, args, out: zero(out))


def norms_over_kept(reference: nn.Module, plan: Plan) -> AbstractContextManager[object]:
    """An approximate plan's reference: statistics are taken over what is kept."""
    return nullcontext() if plan.exact else _KeptNorms(reference, plan)


class _KeptNorms(TorchDispatchMode):
    """Runs LayerNorms, and the standardisation of weights, on the kept channels only."""

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
        keep = torch.tensor(self.scales[id(weight)].keep, device=x.device)
        shift = None if bias is None else bias[keep]
        out, mean, rstd = func(x.index_select(-1, keep), [len(keep)], weight[keep], shift, eps)
        return x.new_zeros(x.shape).index_copy(-1, keep, out), mean, rstd

    def _standardise(self, func: Any, c: Cut, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """[1, filters, inputs · kernel]: inputs that go get weight zero, and no say in the rest."""
        kernel = torch.arange(x.shape[2] // c.size, device=x.device)
        inputs = torch.tensor(c.keep, device=x.device)
        keep = (inputs[:, None] * len(kernel) + kernel).reshape(-1)
        out, mean, rstd = func(x.index_select(2, keep), *rest)
        return x.new_zeros(x.shape).index_copy(2, keep, out), mean, rstd


@torch.no_grad()
def wake_(model: nn.Module, plan: Plan) -> None:
    """Fill what is zero in removed units with noise: masking zeros would show nothing.

    The compact model holds none of it, so it stays the same whatever was there.
    """
    tensors = named_tensors(model)
    with gains_follow(model, (tensors[c.tensor] for c in plan.cuts)):
        _fill_with_noise_(tensors, plan)


def _fill_with_noise_(tensors: Mapping[str, Tensor], plan: Plan) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, cuts in by_tensor(plan.cuts).items():
        tensor = tensors[name]
        if not tensor.is_floating_point() or bool((tensor != 0).all()):
            continue
        stays = torch.ones_like(tensor, dtype=torch.bool)
        for c in cuts:
            Gone.of(c, tensor).zero_(stays)
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        if any(c.role == "scale" for c in cuts):  # may be a variance
            noise = noise.abs() + 0.5
        else:
            noise *= float(tensor.abs().mean())
        tensor.copy_(torch.where(stays | (tensor != 0), tensor, noise))


@torch.no_grad()
def follow_(small: nn.Module, plan: Plan, model: nn.Module) -> None:
    """Give a compact model the weights that the plan keeps of this model's."""
    tensors = named_tensors(small)
    for name, value in named_tensors(rebuild(model, plan)).items():
        if value.is_floating_point() or value.is_complex():
            tensors[name].copy_(value)


class Weights(NamedTuple):
    """How a compact model's parameters compare with the kept part of the original's."""

    comparable: bool
    """Whether it has every parameter the plan leaves, in its shape."""
    changed: str
    """The first one that holds other values, if any."""


@torch.no_grad()
def compare_weights(model: nn.Module, small: nn.Module, plan: Plan) -> Weights:
    """Look whether a compact model holds what the plan keeps."""
    tensors = named_tensors(small)
    changed = ""
    for name, expected in named_tensors(rebuild(model, plan)).items():
        own = tensors.get(name)
        if own is None or own.shape != expected.shape:
            return Weights(False, changed)
        if isinstance(expected, nn.Parameter) and not changed and not _equal(own, expected):
            changed = name
    return Weights(True, changed)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether all values agree; numbers too small to be normal may have become zero."""
    if a.dtype == b.dtype and torch.equal(a, b):
        return True
    if a.dtype != b.dtype or not a.is_floating_point():
        return False
    tiny = torch.finfo(a.dtype).tiny
    return bool(((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= tiny)).all())
