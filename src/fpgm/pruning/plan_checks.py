"""Check that a plan, whoever wrote it, stays within the bounds that the model sets.

A digest shows that a file is unchanged, not who saved it. So a plan is accepted only if a planner
could have written it for this model: tensors are cut within their shapes, only sizes are changed
and they agree with the weights, and adapters are no wider than the model's own tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from fpgm.errors import PlanError
from fpgm.pruning.plan import Attribute, Cached, Cut, Plan
from fpgm.pruning.slicing import by_tensor
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.modules import modules_by_path, named_tensors
from fpgm.utils.size_names import FIRST_DIM, NO_SIZES, SECOND_DIM, SIZES

MAX_ADAPTERS = 4
"""Per module: a gather and a scatter on either side."""
WIDER = 2
"""Times the widest tensor: channels that are joined and split again are read whole by no weight."""


def holds_size(module: nn.Module, name: str) -> bool:
    """Tell whether an attribute may be a number of channels: only those are ever changed.

    In torch's own layers these are a few known names. In other modules it is any integer, or list
    of integers, that the module stores, unless torch uses that name for something else.

    >>> conv = nn.Conv2d(3, 8, 3)
    >>> [holds_size(conv, name) for name in ("out_channels", "stride", "training", "weight")]
    [True, False, False, False]
    """
    kind: type = type(module)
    if name.startswith("__") or name in NO_SIZES or name in _names_of_torch(kind) - SIZES:
        return False
    if _is_torchs(kind) and name not in SIZES:
        return False
    value = _attribute_value(module, name)
    numbers = value if isinstance(value, list | tuple) else (value,)
    return bool(numbers) and all(type(n) is int for n in numbers)


def check_places(model: nn.Module, plan: Plan, earlier: Iterable[Plan]) -> None:
    """Raise if a plan changes the model in a way that no planner would.

    Plans that were applied `earlier` may have widened activations beyond the model's tensors.
    """
    tensors, modules = named_tensors(model), modules_by_path(model)
    widest = WIDER * _widest(tensors, earlier)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if (plan.attributes or plan.adapters) and not plan.cuts:
        raise PlanError("The plan is damaged: it changes sizes, but cuts nothing.")
    _check_cuts(plan.cuts, shapes, widest)
    _check_attributes(plan.attributes, modules)
    _check_layers(plan, modules, tensors)
    _check_adapters(plan.adapters, modules, widest)
    _check_cached(plan.cached, modules)


def _check_cuts(cuts: Iterable[Cut], shapes: Mapping[str, tuple[int, ...]], widest: int) -> None:
    once: set[tuple[str, int]] = set()
    for c in cuts:
        shape = shapes.get(c.tensor, ())
        fits = (
            c.dim < len(shape)
            and (shape[c.dim] == c.size or (shape[c.dim] == 1 and c.size <= widest))
            and not shape[0] % c.blocks
        )
        if not fits or (c.tensor, c.dim) in once:
            raise PlanError(
                f"The plan is damaged: '{c.tensor}' cannot be cut as the plan requires."
            )
        once.add((c.tensor, c.dim))


def _check_attributes(attributes: Iterable[Attribute], modules: Mapping[str, nn.Module]) -> None:
    once: set[tuple[str, str]] = set()
    for a in attributes:
        module = modules.get(a.module)
        held = None if module is None else _attribute_value(module, a.name)
        held = tuple(held) if isinstance(held, list) else held
        is_size = isinstance(held, int | tuple) and type(held) is not bool
        if module is None or not is_size or held != a.before:
            raise PlanError(f"The plan is damaged: '{a.module}' has no {a.name} of {a.before}.")
        if not holds_size(module, a.name):
            raise PlanError(
                f"The plan is damaged: it changes {a.name} of '{a.module}', which is not a number "
                "of channels."
            )
        if not any(a.after if isinstance(a.after, tuple) else (a.after,)) and _is_torchs(
            type(module)
        ):
            raise PlanError(f"The plan is damaged: it reduces {a.name} of '{a.module}' to 0.")
        if (a.module, a.name) in once:
            raise PlanError(f"The plan is damaged: it changes {a.name} of '{a.module}' twice.")
        once.add((a.module, a.name))


def _check_layers(
    plan: Plan, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]
) -> None:
    """Check that the sizes stored in torch's layers match their sliced weights."""
    cuts, names = by_tensor(plan.cuts), {id(tensor): name for name, tensor in tensors.items()}
    groups = {a.module: a.after for a in plan.attributes if a.name == "groups"}
    for a in plan.attributes:
        module = modules[a.module]
        weight = module._parameters.get("weight", module._parameters.get("weight_ih_l0"))
        if weight is None or not _is_layer(module):
            continue
        shape = tuple(weight.shape)
        left = _shape_after(shape, cuts.get(names[id(weight)], ()))
        before = getattr(module, "groups", 1)
        after = groups.get(a.module, before)
        if _described_size(module, a.name, shape, before) == a.before and (
            _described_size(module, a.name, left, after) != a.after
        ):
            raise PlanError(
                f"The plan is damaged: {a.name} of '{a.module}' becomes {a.after}, but its "
                f"weight has another size."
            )
        if a.name in ("groups", "num_groups") and (type(a.after) is not int or left[0] % a.after):
            raise PlanError(
                f"The plan is damaged: the channels of '{a.module}' do not divide into {a.after} "
                "groups."
            )


def _described_size(module: nn.Module, name: str, shape: tuple[int, ...], groups: Any) -> Any:
    """Return the size an attribute should have for a weight's shape; None if unrelated."""
    transposed = bool(getattr(module, "transposed", False))
    if name == "normalized_shape":
        return shape
    if name not in (*FIRST_DIM, *SECOND_DIM):
        return None
    dim = int((name in SECOND_DIM) != transposed)
    if dim >= len(shape):
        return None
    return shape[dim] * (groups if dim else 1)


def _shape_after(shape: tuple[int, ...], cuts: Iterable[Cut]) -> tuple[int, ...]:
    """Return the shape that cuts leave."""
    kept = {c.dim: c.kept for c in cuts if shape[c.dim] == c.size}
    return tuple(kept.get(dim, size) for dim, size in enumerate(shape))


def _check_adapters(
    adapters: Iterable[Adapter], modules: Mapping[str, nn.Module], widest: int
) -> None:
    at: Counter[str] = Counter()
    for adapter in adapters:
        at[adapter.module] += 1
        if not adapter.module or adapter.module not in modules:
            raise PlanError(f"The plan is damaged: there is no module '{adapter.module}'.")
        if adapter.size > widest:
            raise PlanError(
                f"The plan is damaged: it needs {adapter.size} channels at '{adapter.module}', and "
                f"no tensor of the model has more than {widest // WIDER}."
            )
        if at[adapter.module] > MAX_ADAPTERS:
            raise PlanError(
                f"The plan is damaged: it has more than {MAX_ADAPTERS} adapters at "
                f"'{adapter.module}'."
            )


def _check_cached(cached: Iterable[Cached], modules: Mapping[str, nn.Module]) -> None:
    """Check that only what a module caches is cut, not its parameters, buffers or settings."""
    for one in cached:
        module = modules.get(one.module)
        if module is None or _is_setting(module, one.name):
            raise PlanError(f"The plan is damaged: '{one.module}' caches nothing in '{one.name}'.")


def _is_setting(module: nn.Module, name: str) -> bool:
    """Tell whether an attribute is one of torch's own, other than a weight that a hook computes."""
    kind: type = type(module)
    held = vars(module)
    computed = name not in held or isinstance(held[name], Tensor)
    return name in _names_of_torch(kind) and not computed


def _widest(tensors: Mapping[str, Tensor], earlier: Iterable[Plan]) -> int:
    """Return the most channels that any tensor of the model or an earlier plan has."""
    sizes = [n for tensor in tensors.values() for n in tensor.shape]
    return max([1, *sizes, *(a.size for plan in earlier for a in plan.adapters)])


def _attribute_value(module: nn.Module, name: str) -> Any:
    """Return an attribute's value without running the model's code; None for a property."""
    of_class = None
    for base in type(module).__mro__:
        if name in base.__dict__:
            of_class = base.__dict__[name]
            break
    return None if hasattr(type(of_class), "__set__") else module.__dict__.get(name, of_class)


def _is_layer(module: nn.Module) -> bool:
    kinds = (
        nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase, nn.GroupNorm,
        nn.LayerNorm, nn.Embedding, nn.EmbeddingBag, nn.RNNBase,
    )  # fmt: skip
    return isinstance(module, kinds)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


@cache
def _names_of_torch(kind: type) -> frozenset[str]:
    """Return the attributes that torch's classes among a module's bases define."""
    names: set[str] = set(vars(nn.Module()))
    for base in filter(_is_torchs, kind.__mro__):
        names |= {*getattr(base, "__constants__", ()), *vars(base).get("__annotations__", ())}
    return frozenset(names)
