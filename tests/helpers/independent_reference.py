"""A reference for compact models that shares nothing with the package's own verification.

The reference is the original, built again, in which every removed filter is replaced by noise and
every consumer of a removed channel has zeros in its place. It and the compact model run on new
inputs, in float64 where the network allows it. Outputs are compared position by position along
every axis, each on its own scale, whatever container holds them; integers must be equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tests.helpers.output_comparison import difference, leaves
from torch import Tensor, nn
from torch.nn.utils import parametrize, remove_weight_norm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCES = ("filter", "depthwise", "direction", "gain", "shift", "scale")
"""Roles of slices that only the removed unit itself has: noise there must not matter."""
CONSUMES = ("reads", "both")
"""Roles of slices through which other units see the removed one: zero."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}
"""Largest relative difference of one position that rounding explains."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What the comparison found: the worst relative difference, and whether it could see one."""

    error: float
    moved: float
    precision: str
    where: str = ""
    rounding: float = 0.0
    """What rounding explains beyond that: gains of a weight norm are scaled in single precision."""

    @property
    def ok(self) -> bool:
        """Whether the compact model equals the reference to rounding."""
        return self.error <= max(self.rounding, TOLERANCE[getattr(torch, self.precision)])

    def __str__(self) -> str:
        return f"differs by {self.error:.1e} at {self.where} ({self.precision})"


def compare(
    build: Callable[[], nn.Module],
    small: nn.Module,
    plan: Any,
    inputs: Iterable[Any],
    random: bool | None = None,
) -> Comparison:
    """Compare a compact model with the reference on several inputs, in float64 where possible.

    `build` makes the original, the same one every time. The compact model is converted in place.
    `random` says whether outputs are random in eval mode, where that is known.
    """
    inputs = list(inputs)
    dtype = torch.float64
    try:
        with torch.no_grad():
            run(build().double().eval(), _double(inputs[0]))
    except Exception:  # the network insists on its own precision
        dtype = torch.float32
    if random is None:
        random = is_random(build, inputs[0], dtype)
    results = _compare(build, small, plan, inputs, dtype, random)
    single = any(p.dtype == torch.float32 for p in build().parameters())
    return (
        dataclasses.replace(results, rounding=1e-5) if single and _has_gains(build()) else results
    )


def _has_gains(model: nn.Module) -> bool:
    """Whether any weight is a direction times a gain (weight norm, in both of torch's forms)."""
    return any(n.endswith(("weight_g", "weight.original0")) for n, _ in model.named_parameters())


def _compare(
    build: Callable[[], nn.Module],
    small: nn.Module,
    plan: Any,
    inputs: list[Any],
    dtype: torch.dtype,
    random: bool,
) -> Comparison:
    wide = dtype == torch.float64
    if wide:
        inputs = [_double(i) for i in inputs]
    keep_signs = not _stays_finite(build, plan, inputs[0], random, wide)
    original, reference = build().eval(), build().eval()
    make_reference_(reference, plan, keep_signs)
    models = [m.double() if wide else m for m in (original, reference, small.eval())]
    worst, where, moved = 0.0, "", 0.0
    for number, example in enumerate(inputs):
        before, want, have = (run_leaves(m, example, random, number) for m in models)
        want = _keep_outputs(want, plan)
        error, place = difference(want, have, dtype)
        if error > worst or math.isnan(error):
            worst, where = error, f"input {number}, {place}"
        moved = max(moved, difference(before, want, dtype)[0] if not plan.outputs else 1.0)
    return Comparison(worst, moved, str(dtype).removeprefix("torch."), where)


def _stays_finite(
    build: Callable[[], nn.Module], plan: Any, example: Any, random: bool, wide: bool
) -> bool:
    """Whether noise leaves finite outputs finite: the logarithm of a negative number does not."""
    models = [build().eval(), build().eval()]
    make_reference_(models[1], plan)
    results = [run_leaves(m.double() if wide else m, example, random) for m in models]
    before, after = (sum(map(_count_nan, leaves)) for leaves in results)
    return after <= before


def _count_nan(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return int(leaf.isnan().sum())
    return int(isinstance(leaf, float) and math.isnan(leaf))


def make_reference_(model: nn.Module, plan: Any, keep_signs: bool = False) -> None:
    """Put noise into removed filters and zeros into what reads them, in place.

    With `keep_signs` the noise is a random factor for every number: for networks that need
    positive weights, such as a filter bank before a logarithm.
    """
    renamed = _use_computed_weights_(model)
    tensors = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    generator = torch.Generator().manual_seed(1234)
    ordered = sorted(plan.cuts, key=lambda c: c.role in CONSUMES)  # zeros last: they win
    with torch.no_grad():
        for c in ordered:
            if c.role not in (*PRODUCES, *CONSUMES):
                raise ValueError(f"The reference does not know the role {c.role!r}.")
            name = renamed.get(c.tensor, c.tensor)
            if name is not None and tensors[name].shape[c.dim] in (1, c.size):
                _change_removed_(tensors[name].data, c, generator, keep_signs)
    for adapter in plan.adapters:
        if adapter.kind == "scatter":
            _zero_at_module_(model.get_submodule(adapter.module), adapter)


def _use_computed_weights_(model: nn.Module) -> dict[str, str | None]:
    """Replace parametrized weights by what they compute; return what became of their tensors.

    Removing a filter must not change the others, so what loses slices is the weight itself, not
    what it is computed from. Tensors that have no place of their own in it become None.
    """
    renamed: dict[str, str | None] = {}
    for path, module in list(model.named_modules()):
        before = f"{path}." if path else ""
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, WeightNorm):
                remove_weight_norm(module, hook.name)
                for part in ("_g", "_v"):  # a gain has the weight's axes, too
                    renamed[f"{before}{hook.name}{part}"] = f"{before}{hook.name}"
        if parametrize.is_parametrized(module):
            renamed |= _use_computed_weights_of_(module, before)
    return renamed


def _use_computed_weights_of_(module: nn.Module, before: str) -> dict[str, str | None]:
    """Do so for one module; its class is left alone, because copies of the module share it."""
    renamed: dict[str, str | None] = {}
    computed = {}
    for name, steps in module.parametrizations.items():
        value = getattr(module, name).detach().clone()
        inside = [*steps.named_parameters(), *steps.named_buffers()]
        parts = {n for n, t in inside if n.startswith("original") and t.ndim == value.ndim}
        if not parts:
            return {}
        computed[name] = value
        path = f"{before}parametrizations.{name}."
        renamed |= {path + n: f"{before}{name}" if n in parts else None for n, _ in inside}
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    for name, value in computed.items():
        module.register_parameter(name, nn.Parameter(value))
    return renamed


def _change_removed_(tensor: Tensor, c: Any, generator: torch.Generator, keep_signs: bool) -> None:
    if tensor.shape[c.dim] == 1 and c.size > 1:
        return
    rows = tensor.shape[0] // c.blocks
    kept = len(c.keep) // c.blocks
    for b in range(c.blocks):
        part = tensor[b * rows : (b + 1) * rows] if c.blocks > 1 else tensor
        stays = set(c.keep[b * kept : (b + 1) * kept])
        for i in set(range(c.size)) - stays:
            view = part.select(c.dim, i)
            if c.role in CONSUMES:
                view.zero_()
            elif view.is_floating_point():
                noise = torch.rand(view.shape, generator=generator) + 0.5
                if keep_signs:
                    view.mul_(noise)
                else:
                    view.copy_(noise if c.role in ("gain", "scale") else _signed(noise, generator))


def _signed(noise: Tensor, generator: torch.Generator) -> Tensor:
    return noise * (torch.randint(0, 2, noise.shape, generator=generator) * 2 - 1)


def _zero_at_module_(module: nn.Module, adapter: Any) -> None:
    removed = torch.tensor(sorted(set(range(adapter.size)) - set(adapter.index)))

    def zero(x: Tensor) -> Tensor:
        return x.index_fill(adapter.dim, removed, 0)

    def at_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (zero(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: zero(kwargs[first])}

    if adapter.side == "input":
        module.register_forward_pre_hook(at_input, with_kwargs=True)
    else:
        module.register_forward_hook(lambda _, args, out: zero(out))


def _keep_outputs(leaves: list[Any], plan: Any) -> list[Any]:
    """What is left of outputs that were allowed to shrink."""
    for c in plan.outputs:
        number = int(c.tensor)
        leaves[number] = leaves[number].index_select(c.dim, torch.tensor(c.keep))
    return leaves


# Running a model on inputs of any form.


def run(model: nn.Module, example: Any) -> Any:
    """Call a model with a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**{k: _cloned(v) for k, v in example.items()})
    args = example if isinstance(example, tuple) else (example,)
    return model(*(_cloned(a) for a in args))


def run_leaves(model: nn.Module, example: Any, random: bool, seed: int = 0) -> list[Any]:
    """Return every value in a model's output, with random numbers the same for every width."""
    torch.manual_seed(seed)
    with torch.no_grad():
        if random:
            with SameRandomNumbers(seed):
                return leaves(run(model, example))
        return leaves(run(model, example))


def is_random(build: Callable[[], nn.Module], example: Any, dtype: torch.dtype) -> bool:
    """Whether two seeds give different outputs in eval mode."""
    wide = dtype == torch.float64
    results = []
    for seed in (1, 2):
        model = build().double().eval() if wide else build().eval()
        results.append(run_leaves(model, _double(example) if wide else example, False, seed))
    return difference(*results, dtype)[0] > 0


class SameRandomNumbers(TorchDispatchMode):
    """Replaces random tensors by one random number each.

    Models of different widths draw tensors of different shapes, so that the same seed would give
    the kept channels other numbers; one number for all is the same in both.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        drawn_around = _drawn_around(name, args)
        if drawn_around is not None:
            return args[0].copy_(drawn_around) if name.endswith("_") else drawn_around.clone()
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        number = float(torch.rand((), generator=self.generator))
        if name == "native_dropout":
            return (args[0] * (0.5 + number), torch.ones_like(out[1]))
        if not isinstance(out, Tensor) or name.startswith(("multinomial", "randperm")):
            return out
        if name.startswith("bernoulli"):
            return out.fill_(1)
        return out.fill_(number) if out.is_floating_point() else out.fill_(0)


def _drawn_around(name: str, args: Any) -> Tensor | None:
    """Return the numbers of the model that decide what is drawn: they must stay visible."""
    if name in (
        "poisson",
        "_standard_gamma",
        "_sample_dirichlet",
        "rrelu_with_noise",
        "rrelu_with_noise_",
    ):
        return args[0]
    if name == "bernoulli" and len(args) == 1:
        return args[0]
    if name.startswith("bernoulli") and len(args) > 1 and isinstance(args[1], Tensor):
        return args[1]
    if name == "binomial":
        return args[0] * args[1]
    tensors = [a for a in args if isinstance(a, Tensor)]
    return sum(tensors, torch.zeros(())) if name == "normal" and tensors else None


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(_cloned(v) for v in value)
    return {k: _cloned(v) for k, v in value.items()} if type(value) is dict else value


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_double(v) for v in value)
    return {k: _double(v) for k, v in value.items()} if type(value) is dict else value


# Training.


def training_fault(model: nn.Module, example: Any) -> str | None:
    """Train forward and backward once; the reason as one line if that fails."""
    model.train()
    torch.manual_seed(0)
    try:
        outputs = [
            t
            for t in leaves(run(model, example))
            if isinstance(t, Tensor) and t.requires_grad and t.numel()
        ]
        if not outputs:
            return "no output has a gradient"
        total = sum((t.abs() if t.is_complex() else t).float().square().mean() for t in outputs)
        total.backward()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None
