"""Applying a plan: a new, smaller module of the user's own class.

The copy is a deep copy in which sliced tensors take the place of the originals from the start, so
ties between parameters, references elsewhere in the model and hooks come along by themselves, and
the full weights are never copied. The input model is untouched.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.adapters import attach_
from fpgm.denormals import flush_denormals_
from fpgm.errors import PlanError
from fpgm.optimizers import move_optimizer_
from fpgm.plan import Attribute, Cut, Plan
from fpgm.slicing import by_tensor, cut
from fpgm.tensors import modules_by_path, named_tensors, unwrapped
from fpgm.turns import in_turn

PLANS = "fpgm_plans"
"""Attribute under which a compact model carries the plans that made it, oldest first."""


@in_turn
def compact(
    model: nn.Module, plan: Plan, *, optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    """Return a copy of the model without the units the plan removes.

    Of a model in a wrapper (DataParallel, DDP, torch.compile) that is of the module inside. An
    `optimizer` of the model given along is handed over to the copy, in place and with its state,
    so that training goes on where it was.

    >>> import fpgm
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> small = fpgm.compact(net, fpgm.plan(net, torch.zeros(1, 3, 8, 8), rate=0.5, align=1))
    >>> small[0].out_channels, net[0].out_channels
    (4, 8)
    """
    model = unwrapped(model)
    check_fits(model, plan)
    small = rebuild(model, plan)
    flush_denormals_(small)
    if optimizer is not None:
        move_optimizer_(optimizer, model, small, plan)
    return small


def rebuild(model: nn.Module, plan: Plan, *, values: bool = True) -> nn.Module:
    """The compact model; without `values` in shape only: what is cut is zeros."""
    cuts = by_tensor(plan.cuts)
    memo: dict[int, object] = {}
    for name, original in named_tensors(model).items():
        if name in cuts and values:
            memo[id(original)] = _like(original, cut(original.detach(), cuts[name]))
        elif name in cuts:
            memo[id(original)] = _like(original, _zeros(original, cuts[name]))
    small = clone(model, memo)
    modules = modules_by_path(small)
    for attribute in plan.attributes:
        _assign(modules[attribute.module], attribute)
    for adapter in plan.adapters:
        attach_(small, adapter)
    setattr(small, PLANS, (*getattr(model, PLANS, ()), plan))
    return small


def shadow(model: nn.Module) -> nn.Module:
    """A copy with the model's own weights: hooks and attributes of the two are apart."""
    return clone(model, {id(tensor): tensor for tensor in named_tensors(model).values()})


def clone(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """`copy.deepcopy(model, memo)`, several times faster for ordinary modules.

    A module is mostly empty hook tables and numbers, which deepcopy visits one by one. Modules
    that copy themselves in their own way (`__deepcopy__`, `__getstate__`…) are left to deepcopy.
    """
    modules = list(modules_by_path(model).values())
    ordinary = {kind for kind in {type(m) for m in modules} if _is_ordinary(kind)}
    for module in modules:
        if type(module) in ordinary:
            memo[id(module)] = object.__new__(type(module))
    for module in modules:
        new = memo.get(id(module))
        if new is not None:
            for name, value in module.__dict__.items():
                new.__dict__[name] = _copied(value, memo, name in _TABLES)
    return copy.deepcopy(model, memo)


def _is_ordinary(kind: type[nn.Module]) -> bool:
    return (
        not hasattr(kind, "__deepcopy__")
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__setstate__.__module__.startswith("torch.nn.")  # those only fill in defaults
        and getattr(kind, "__getstate__", None) is getattr(nn.Module, "__getstate__", None)
        and not hasattr(kind, "__slots__")
    )


_ATOMIC = frozenset((int, float, bool, str, type(None), type, FunctionType, BuiltinFunctionType))


_TABLES = frozenset(nn.Module().__dict__)
"""What every module holds: tables of its own that nothing else shares."""


def _copied(value: Any, memo: dict[int, object], own: bool = False) -> Any:
    kind = type(value)
    if kind in _ATOMIC or (kind is tuple and all(type(item) in _ATOMIC for item in value)):
        return value
    if own and kind in (OrderedDict, dict):
        return kind((k, _copied(v, memo)) for k, v in value.items()) if value else kind()
    if own and kind is set:
        return set(value)
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor) and not value.is_leaf:
        return value.detach().clone()  # a cached result: deepcopy refuses those
    return copy.deepcopy(value, memo)


def _zeros(original: Tensor, cuts: Sequence[Cut]) -> Tensor:
    shape = list(original.shape)
    for c in cuts:
        shape[c.dim] = c.kept
    return original.new_zeros(shape)


def _like(original: Tensor, new: Tensor) -> Tensor:
    """Same memory format, same kind, same requires_grad."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if new.ndim == (4 if layout == torch.channels_last else 5) and (
            original.is_contiguous(memory_format=layout) and not original.is_contiguous()
        ):
            new = new.contiguous(memory_format=layout)
            break
    else:
        new = new.contiguous()
    if isinstance(original, nn.Parameter):
        return nn.Parameter(new, requires_grad=original.requires_grad)
    return new


def _assign(module: nn.Module, attribute: Attribute) -> None:
    value: Any = attribute.after
    if isinstance(getattr(module, attribute.name), list):
        value = list(value)
    setattr(module, attribute.name, value)


def fingerprint(model: nn.Module) -> str:
    """A short name for a model's tensors and their shapes."""
    text = ";".join(f"{name}{tuple(t.shape)}" for name, t in sorted(named_tensors(model).items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan of another model, naming the first tensor that differs."""
    tensors: Mapping[str, Tensor] = named_tensors(model)
    if fingerprint(model) == plan.fingerprint:
        _check_places(model, plan, tensors)
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


def _check_places(model: nn.Module, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a plan that has been changed since it was made: it names what the model lacks."""
    modules = modules_by_path(model)
    once: set[tuple[str, int]] = set()
    for c in plan.cuts:
        shape = list(tensors[c.tensor].shape) if c.tensor in tensors else []
        fits = c.dim < len(shape) and shape[c.dim] in (1, c.size) and not shape[0] % c.blocks
        if not fits or (c.tensor, c.dim) in once:
            raise PlanError(f"The plan is damaged: '{c.tensor}' cannot be cut as it says.")
        once.add((c.tensor, c.dim))
    for a in plan.attributes:
        value = getattr(modules.get(a.module), a.name, None)
        value = tuple(value) if isinstance(value, list) else value
        if not isinstance(value, int | tuple) or value != a.before:
            raise PlanError(f"The plan is damaged: '{a.module}' has no {a.name} of {a.before}.")
    for adapter in plan.adapters:
        if adapter.module not in modules:
            raise PlanError(f"The plan is damaged: there is no module '{adapter.module}'.")
