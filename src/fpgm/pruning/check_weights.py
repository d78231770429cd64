"""Weights with which nothing can hide: for the check only, in copies of both models.

Fresh or trained, a model may hold values that conceal a mistake: norms whose channels are all
alike, gains of zero, activations that vanish, units that never fire. Parameters get values that
tell channels apart, and every layer's output gets a visible size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.pruning.plan import Plan
from fpgm.utils.modules import modules_by_path, named_tensors

FAINT = 1e-3
"""Parameters smaller than this (zero-initialised gains, layer scale 1e-6) hide what is behind."""

_SPREAD = 0.2
_SHIFT = 0.05


@torch.no_grad()
def vary_(model: nn.Module, plan: Plan) -> None:
    """Give every parameter that may change or is cut a value of its own at every position."""
    generator = torch.Generator().manual_seed(0)
    cuts = {c.tensor for c in plan.cuts}
    shifts = {c.tensor for c in plan.cuts if c.role == "shift"}
    for name, tensor in named_tensors(model).items():
        trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if not trainable and name not in cuts:
            continue
        is_shift = name in shifts or name.endswith("bias")
        is_faint = float(tensor.abs().max()) < FAINT and not is_shift
        if isinstance(tensor, nn.Parameter) and is_faint:
            tensor.copy_(torch.rand(tensor.shape, generator=generator).to(tensor) + 0.5)
        elif tensor.ndim < 2 or _repeats(tensor):
            tensor.copy_(_varied(tensor, isinstance(tensor, nn.Parameter), generator))


def _repeats(weight: Tensor) -> bool:
    """Whether some channels of a weight look alike, so that one could pass for another."""
    for dim, count in enumerate(weight.shape):
        sums = weight.sum([d for d in range(weight.ndim) if d != dim])
        if len(sums.unique()) < count:
            return True
    return False


def _varied(tensor: Tensor, is_parameter: bool, generator: torch.Generator) -> Tensor:
    factor = torch.rand(tensor.shape, generator=generator).to(tensor)
    scaled = tensor * (1 + _SPREAD * (2 * factor - 1))
    if not is_parameter:  # a buffer may hold variances: signs and zeros stay
        return scaled
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    return scaled + _SHIFT * noise * (float(tensor.abs().mean()) or 1.0)


@dataclass
class Calibration:
    """What a calibration did: tensors set to new values, and weights divided by a number."""

    values: dict[int, Tensor] = field(default_factory=dict)
    divisors: dict[int, Tensor] = field(default_factory=dict)
    """Both by the `id` of the tensor."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @torch.no_grad()
    def repeat_(self, model: nn.Module, other: nn.Module) -> None:
        """Do to another copy of the model what was done to this one."""
        tensors = named_tensors(other)
        for name, tensor in named_tensors(model).items():
            if id(tensor) in self.values:
                tensors[name].copy_(tensor)
            elif id(tensor) in self.divisors:
                tensors[name].div_(self.divisors[id(tensor)])


@torch.no_grad()
def calibrate_(model: nn.Module, run: Callable[[nn.Module], Any]) -> Calibration:
    """Run the model once; set weights and batch norms so that every layer's output is near one."""
    done = Calibration()
    with _hooks(model, done):
        run(model)
    return done


@contextmanager
def _hooks(model: nn.Module, done: Calibration) -> Iterator[None]:
    handles = []
    try:
        for module in modules_by_path(model).values():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                handles.append(module.register_forward_pre_hook(_norm_hook(done), prepend=True))
            elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                handles.append(module.register_forward_hook(_layer_hook(done), prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _norm_hook(done: Calibration) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        mean, var = module.running_mean, module.running_var
        x = args[0] if args else None
        if not isinstance(mean, Tensor) or not isinstance(var, Tensor) or id(mean) in done.values:
            return
        if not isinstance(x, Tensor) or not x.numel():
            return
        center, spread = _statistics(x, 1)
        if bool(center.isfinite().all()) and bool(spread.isfinite().all()):
            done.values |= {id(mean): mean, id(var): var}
            # Centred inputs would make all means alike, and hide which belongs to which channel.
            shift, factor = (
                torch.rand(mean.shape, generator=done.generator).to(mean) for _ in range(2)
            )
            var.copy_(torch.where(spread > 0, spread.square(), 1.0).expand_as(var))
            mean.copy_(center.expand_as(mean) + _SPREAD * (2 * shift - 1) * var.sqrt())
            var.mul_(1 + _SPREAD * (2 * factor - 1))

    return hook


def _layer_hook(done: Calibration) -> Callable[[nn.Module, Any, Any], Tensor | None]:
    def hook(module: nn.Module, args: Any, out: Any) -> Tensor | None:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight is None or not isinstance(out, Tensor) or id(weight) in done.divisors:
            return None
        if not out.numel():  # an expert that no sample was sent to
            return None
        dim = out.ndim - 1 if isinstance(module, nn.Linear) else out.ndim - weight.ndim + 1
        center, spread = _statistics(out, dim)
        scale = spread.square().mean().sqrt()
        if not bool(scale.isfinite()) or not float(scale) > 0:
            return None
        done.divisors[id(weight)] = scale
        weight.div_(scale)
        if bias is not None:
            done.values[id(bias)] = bias
            bias.copy_((bias - center) / scale)
            shape = [-1 if d == dim and center.numel() > 1 else 1 for d in range(out.ndim)]
            return (out - center.reshape(shape)) / scale
        return out / scale

    return hook


def _statistics(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and spread of every channel, or of all together where a channel does not vary."""
    others = [d for d in range(x.ndim) if d != dim]
    if others:
        center, spread = x.mean(others), x.std(others, correction=0)
        if float(spread.max()) > 1e-6 * float(x.abs().max()):
            return center, spread
    center, spread = x.mean(), x.std(correction=0)
    alike = float(spread) <= 1e-6 * float(x.abs().max())
    return center.reshape(1), (spread * (0.0 if alike else 1.0)).reshape(1)
