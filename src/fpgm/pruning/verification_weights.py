"""Weights that expose every mistake: for verification only, in copies of both models.

A model, trained or not, may have values that hide a mistake: norms whose channels are all equal,
gains of zero, activations that vanish, dead units. Parameters get values that differ between
channels, and every layer's output is scaled to about one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.pruning.plan import Plan
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import modules_by_path, named_tensors

TINY = 1e-3
"""Parameters smaller than this (zero-initialised gains, layer scale 1e-6) hide later layers."""

_SPREAD = 0.2
_SHIFT = 0.05


@torch.no_grad()
def vary_weights_(model: nn.Module, plan: Plan) -> None:
    """Give every trainable or cut parameter a different value at every position."""
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
        is_tiny = float(tensor.abs().max()) < TINY and not is_shift
        if isinstance(tensor, nn.Parameter) and is_tiny:
            tensor.copy_(torch.rand(tensor.shape, generator=generator).to(tensor) + 0.5)
        elif tensor.ndim < 2 or _repeats(tensor):
            tensor.copy_(_vary(tensor, isinstance(tensor, nn.Parameter), generator))


def _repeats(weight: Tensor) -> bool:
    """Tell whether some channels of a weight are equal, so that a mix-up would go unnoticed."""
    for dim, count in enumerate(weight.shape):
        sums = weight.sum([d for d in range(weight.ndim) if d != dim])
        if len(sums.unique()) < count:
            return True
    return False


def _vary(tensor: Tensor, is_parameter: bool, generator: torch.Generator) -> Tensor:
    factor = torch.rand(tensor.shape, generator=generator).to(tensor)
    scaled = tensor * (1 + _SPREAD * (2 * factor - 1))
    if not is_parameter:  # a buffer may hold variances: keep signs and zeros
        return scaled
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    return scaled + _SHIFT * noise * (float(tensor.abs().mean()) or 1.0)


@dataclass
class Calibration:
    """The changes of a calibration: tensors with new values, and weights divided by a number."""

    values: dict[int, Tensor] = field(default_factory=dict)
    divisors: dict[int, Tensor] = field(default_factory=dict)
    """Both by the `id` of the tensor."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @torch.no_grad()
    def repeat_(self, model: nn.Module, other: nn.Module) -> None:
        """Apply the same changes to another copy of the model."""
        tensors = named_tensors(other)
        for name, tensor in named_tensors(model).items():
            if id(tensor) in self.values:
                tensors[name].copy_(tensor)
            elif id(tensor) in self.divisors:
                tensors[name].div_(self.divisors[id(tensor)])


@torch.no_grad()
def calibrate_(model: nn.Module, run: Callable[[nn.Module], Any]) -> Calibration:
    """Run the model once; set weights and batch norms so that every layer's output is near one."""
    calibration = Calibration()
    with _hooks(model, calibration):
        run(model)
    return calibration


@contextmanager
def _hooks(model: nn.Module, calibration: Calibration) -> Iterator[None]:
    with temporary_hooks() as handles:
        for module in modules_by_path(model).values():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                handles.append(
                    module.register_forward_pre_hook(_norm_hook(calibration), prepend=True)
                )
            elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                handles.append(module.register_forward_hook(_layer_hook(calibration), prepend=True))
        yield


def _norm_hook(calibration: Calibration) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        mean, var = module.running_mean, module.running_var
        x = args[0] if args else None
        if (
            not isinstance(mean, Tensor)
            or not isinstance(var, Tensor)
            or id(mean) in calibration.values
        ):
            return
        if not isinstance(x, Tensor) or not x.numel():
            return
        center, spread = _statistics(x, 1)
        if bool(center.isfinite().all()) and bool(spread.isfinite().all()):
            calibration.values |= {id(mean): mean, id(var): var}
            # Centered inputs would make all means equal, and hide a mix-up of channels.
            shift, factor = (
                torch.rand(mean.shape, generator=calibration.generator, device="cpu").to(mean)
                for _ in range(2)
            )
            var.copy_(torch.where(spread > 0, spread.square(), 1.0).expand_as(var))
            mean.copy_(center.expand_as(mean) + _SPREAD * (2 * shift - 1) * var.sqrt())
            var.mul_(1 + _SPREAD * (2 * factor - 1))

    return hook


def _layer_hook(calibration: Calibration) -> Callable[[nn.Module, Any, Any], Tensor | None]:
    def hook(module: nn.Module, args: Any, out: Any) -> Tensor | None:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight is None or not isinstance(out, Tensor) or id(weight) in calibration.divisors:
            return None
        if not out.numel():  # an expert that got no sample
            return None
        dim = out.ndim - 1 if isinstance(module, nn.Linear) else out.ndim - weight.ndim + 1
        center, spread = _statistics(out, dim)
        scale = spread.square().mean().sqrt()
        if not bool(scale.isfinite()) or not float(scale) > 0:
            return None
        calibration.divisors[id(weight)] = scale
        weight.div_(scale)
        if bias is not None:
            calibration.values[id(bias)] = bias
            bias.copy_((bias - center) / scale)
            shape = [-1 if d == dim and center.numel() > 1 else 1 for d in range(out.ndim)]
            return (out - center.reshape(shape)) / scale
        return out / scale

    return hook


def _statistics(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return mean and spread of every channel, or of all where channels do not vary."""
    others = [d for d in range(x.ndim) if d != dim]
    if others:
        center, spread = x.mean(others), x.std(others, correction=0)
        if float(spread.max()) > 1e-6 * float(x.abs().max()):
            return center, spread
    center, spread = x.mean(), x.std(correction=0)
    alike = float(spread) <= 1e-6 * float(x.abs().max())
    return center.reshape(1), (spread * (0.0 if alike else 1.0)).reshape(1)
