"""The reference a compact model is checked against: the full-size model, units silenced.

Every reader ignores the removed units; where the compact model scatters among zeros, the same
channels are zeroed. For an approximate plan, norms take their statistics over what is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fpgm.masking import silence_
from fpgm.plan import Adapter, Cut, Plan
from fpgm.slicing import Gone, by_tensor, cut
from fpgm.tensors import named_tensors

FAINT = 1e-3
"""Parameters smaller than this (zero-initialised gains, layer scale 1e-6) hide what is behind."""


def silenced(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy in which every reader ignores the removed units."""
    quiet = copy.deepcopy(model)
    silence_(quiet, plan, ("reads", "both"))
    for adapter in plan.adapters:
        if adapter.kind == "scatter":
            _silence_at_(quiet, adapter)
    return quiet


def _silence_at_(model: nn.Module, adapter: Adapter) -> None:
    """Where the compact model scatters among zeros, the reference zeroes the same channels."""
    module = model.get_submodule(adapter.module)
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

    def __init__(self, reference: nn.Module, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = named_tensors(reference)
        self.scales = {id(tensors[c.tensor]): c for c in plan.cuts if c.role == "scale"}
        self.reads = {id(tensors[c.tensor]): c for c in plan.cuts if c.role == "reads"}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
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


def faint(model: nn.Module, plan: Plan) -> list[str]:
    """Parameters that hide what is behind them; shifts cannot, so their zeros are fine."""
    shifts = {c.tensor for c in plan.cuts if c.role == "shift"}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and parameter.numel()
        and name not in shifts
        and not name.endswith("bias")
        and float(parameter.detach().abs().max()) < FAINT
    ]


@torch.no_grad()
def wake_(model: nn.Module, plan: Plan) -> None:
    """Fill removed units that are zero already with noise: silencing those would show nothing.

    The compact model holds none of it, so it stays the same whatever stood there.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = named_tensors(model)
    for name, cuts in by_tensor(plan.cuts).items():
        tensor = tensors[name]
        asleep = torch.zeros_like(tensor, dtype=torch.bool)
        for c in cuts:
            stays = torch.ones_like(tensor, dtype=torch.bool)
            Gone.of(c, stays).zero_(stays)
            if c.role != "scale" and not bool(tensor[~stays].any()):
                asleep |= ~stays
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor) * tensor.std()
            tensor.copy_(torch.where(asleep, noise, tensor))


@torch.no_grad()
def stir_(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Give these parameters a size that shows; returns their new values."""
    generator = torch.Generator().manual_seed(0)
    tensors = named_tensors(model)
    for name in names:
        noise = torch.rand(tensors[name].shape, generator=generator) + 0.5
        tensors[name].copy_(noise.to(tensors[name]))
    return {name: tensors[name] for name in names}


@torch.no_grad()
def follow_(small: nn.Module, plan: Plan, values: Mapping[str, Tensor]) -> None:
    """Give a compact model the kept part of these values."""
    cuts = by_tensor(plan.cuts)
    tensors = named_tensors(small)
    for name, value in values.items():
        tensors[name].copy_(cut(value, cuts.get(name, [])))
