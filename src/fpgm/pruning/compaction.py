"""Apply a plan: build a new, smaller module of the user's own class.

The copy is a deep copy in which sliced tensors take the place of the originals from the start, so
tied parameters, references elsewhere in the model and hooks are preserved, and the full weights are
never copied. The input model is not changed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.errors import PlanError
from fpgm.pruning.adapter_placement import attach_
from fpgm.pruning.optimizer_state import move_optimizer_
from fpgm.pruning.plan import Attribute, Cached, Cut, Plan
from fpgm.pruning.plan_checks import check_places
from fpgm.pruning.slicing import Positions, by_tensor, cut
from fpgm.utils.channel_adapters import Adapted, buffer_names
from fpgm.utils.copying import Memo, clone
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.denormals import flush_denormals_
from fpgm.utils.modules import (
    cache_modules,
    modules_by_path,
    named_tensors,
    outer_modules_by_path,
    unwrap_model,
)
from fpgm.utils.thread_lock import pause_garbage_collection, with_global_lock
from fpgm.utils.weight_hooks import compute_weights_
from fpgm.utils.weight_norm import gain_ratio, weight_norms

PLANS = "fpgm_plans"
"""Attribute under which a compact model carries the plans that made it, oldest first."""


@cpu_by_default()
@with_global_lock
@pause_garbage_collection()
def compact(
    model: nn.Module, plan: Plan, *, optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    """Return a copy of the model without the units the plan removes.

    If the model is wrapped (DataParallel, DDP, torch.compile), the module inside is copied. An
    `optimizer` of the model is moved to the copy, in place and with its state, so that training
    continues where it was.

    >>> import fpgm
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> small = fpgm.compact(net, fpgm.plan(net, torch.zeros(1, 3, 8, 8), rate=0.5, align=1))
    >>> small[0].out_channels, net[0].out_channels
    (4, 8)
    """
    model = unwrap_model(model)
    with cache_modules(model):
        check_fits(model, plan)
        small = rebuild(model, plan)
    setattr(small, PLANS, (*vars(model).get(PLANS, ()), plan))
    flush_denormals_(small)
    if optimizer is not None:
        move_optimizer_(optimizer, model, small, plan)
    return small


@torch.inference_mode(False)  # its weights must be trainable, wherever the user calls this
def rebuild(model: nn.Module, plan: Plan, *, values: bool = True) -> nn.Module:
    """Build the compact model; without `values`, its parameters are zeros of the right shape."""
    cuts = by_tensor(plan.cuts)
    memo: Memo = {}
    positions: Positions = {}
    for name, original in named_tensors(model).items():
        if name in cuts and values:
            memo[id(original)] = _match_kind(
                original, cut(original.detach(), cuts[name], positions)
            )
        elif name in cuts or (not values and isinstance(original, nn.Parameter)):
            memo[id(original)] = _match_kind(original, _zeros(original, cuts.get(name, ())))
    if values:
        _scale_gains(model, cuts, memo)
    small = clone(model, memo)
    modules = modules_by_path(small)
    for attribute in plan.attributes:
        _assign(modules[attribute.module], attribute)
    for cached in plan.cached:
        held = vars(modules[cached.module])
        if cached.name in held:
            held[cached.name] = _cut_cached(held[cached.name], cached)
    compute_weights_(small)
    attach_(small, *plan.adapters)
    return small


def _scale_gains(model: nn.Module, cuts: Mapping[str, Sequence[Cut]], memo: Memo) -> None:
    """Scale the gains of weight norms to compensate for the part of the norm that is cut."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    for norm in weight_norms(model):
        direction = memo.get(id(norm.direction))
        if not isinstance(direction, Tensor):
            continue
        gain = memo.get(id(norm.gain), norm.gain)
        assert isinstance(gain, Tensor)
        before = cut(norm.norms(), cuts.get(names[id(norm.gain)], []))
        scaled = gain.detach().double() * gain_ratio(norm.norms(direction), before)
        memo[id(norm.gain)] = _match_kind(norm.gain, scaled.to(gain.dtype))


def _zeros(original: Tensor, cuts: Sequence[Cut]) -> Tensor:
    shape = list(original.shape)
    for c in cuts:
        shape[c.dim] = c.kept
    return original.new_zeros(shape)


def _match_kind(original: Tensor, new: Tensor) -> Tensor:
    """Give a new tensor the original's memory format, kind and requires_grad."""
    layout = _CHANNELS_LAST.get(new.ndim, torch.contiguous_format)
    if original.is_contiguous() or not original.is_contiguous(memory_format=layout):
        layout = torch.contiguous_format
    new = new.contiguous(memory_format=layout)
    if isinstance(original, nn.Parameter):
        return nn.Parameter(new, requires_grad=original.requires_grad)
    return new


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _assign(module: nn.Module, attribute: Attribute) -> None:
    value: Any = attribute.after
    if isinstance(getattr(module, attribute.name), list):
        value = list(value)
    setattr(module, attribute.name, value)


def _cut_cached(value: Any, cached: Cached) -> Any:
    """Cut cached tensors of the old width; drop those that do not fit."""
    if isinstance(value, Tensor):
        if cached.dim >= value.ndim or value.shape[cached.dim] != cached.size or not cached.keep:
            return None
        index = torch.tensor(cached.keep, device=value.device)
        return value.detach().index_select(cached.dim, index)
    if isinstance(value, dict):
        fitted = {k: _cut_cached(v, cached) for k, v in value.items()}
        stays = {k: v for k, v in fitted.items() if v is not None or value[k] is None}
        value.clear()
        value.update(stays)
    elif isinstance(value, list):
        value[:] = [_cut_cached(item, cached) for item in value]
    elif isinstance(value, deque | set):
        others = [item for item in value if not isinstance(item, Tensor)]
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(others)
    elif type(value) is tuple:
        return tuple(_cut_cached(item, cached) for item in value)
    return value


def fingerprint(model: nn.Module) -> str:
    """Hash a model's tensor names and shapes into a short text."""
    tensors = named_tensors(model)
    for path, module in outer_modules_by_path(model).items():
        if isinstance(module, Adapted):
            tensors |= {f"{path}.{name}": t for name, t in buffer_names(module).items()}
    text = ";".join(f"{name}{tuple(t.shape)}" for name, t in sorted(tensors.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Raise if a plan is for another model, naming the first tensor that differs."""
    tensors: Mapping[str, Tensor] = named_tensors(model)
    if fingerprint(model) == plan.fingerprint:
        check_places(model, plan, vars(model).get(PLANS, ()))
        return
    for c in plan.cuts:
        if c.tensor not in tensors:
            raise PlanError(
                f"The plan was made for another model: this one has no tensor '{c.tensor}'."
            )
        size = tensors[c.tensor].shape[c.dim] if c.dim < tensors[c.tensor].ndim else None
        if size != c.size:
            raise PlanError(
                f"The plan was made for another model: '{c.tensor}' has size {size} along dim "
                f"{c.dim}, the plan expects {c.size}."
            )
    raise PlanError(
        f"The plan was made for another model: its tensors or their shapes differ from this "
        f"{type(model).__name__}'s beyond what the plan cuts."
    )
