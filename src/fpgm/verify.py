"""The certificate: the compact model computes what the original does with those units silenced.

The reference is the full-size model in which every reader ignores the removed units. Both run on
the examples and on random inputs of the same shape; outputs must agree to rounding, and the
reference must differ from the original, or the check would have proved nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fpgm.compact import check_fits, compact
from fpgm.errors import VerificationError
from fpgm.examples import Example, as_examples, tensors_in
from fpgm.masking import silence_
from fpgm.plan import Adapter, Cut, Plan
from fpgm.tensors import named_tensors

TOLERANCE = 1e-4
"""Largest relative difference that float32 rounding explains in a deep network."""

_EXACT_TOLERANCE = 1e-8
_LIVE = 1e-3


@dataclass(frozen=True)
class Certificate:
    """What verification found.

    `max_error` is the largest difference between compact and reference, `moved` that between
    reference and original, both relative to the output's largest value.
    """

    max_error: float
    moved: float
    inputs: int
    tolerance: float
    precision: str
    exact: bool = True

    @property
    def ok(self) -> bool:
        """Equal to rounding, and not vacuously so."""
        return self.max_error <= self.tolerance and self.moved > 100 * self.max_error

    def check(self) -> Certificate:
        """Raise unless ok."""
        if self.ok:
            return self
        if self.max_error <= self.tolerance:
            raise VerificationError(
                f"Nothing was proved: silencing the removed units moves the output by only "
                f"{self.moved:.1e}. Verify with trained weights or other example inputs."
            )
        raise VerificationError(
            f"The compact model is not the silenced one: outputs differ by {self.max_error:.1e} "
            f"(tolerance {self.tolerance:.0e}). Do not use it; please report the model."
        )


def verify(
    model: nn.Module,
    plan: Plan,
    example_inputs: Any,
    *,
    compacted: nn.Module | None = None,
    inputs: int = 2,
) -> Certificate:
    """Compare the compact model with the silenced original on the examples and random inputs.

    Works in the model's precision first; if that leaves doubt (or the weights are such that the
    removed units hardly matter), again in float64 with degenerate scales stirred.
    """
    check_fits(model, plan)
    examples = as_examples(example_inputs)
    small = compacted if compacted is not None else compact(model, plan)
    trials = [*examples, *_random_like(examples, inputs - 1)]
    found = _compare(_quiet(model, plan), _quiet(model, None), copy.deepcopy(small), trials, plan)
    if found.ok and found.moved > _LIVE:
        return found
    if compacted is not None and not _same_tensors(compacted, compact(model, plan)):
        return found  # what follows rebuilds the compact model, and would prove another one right
    return _second_opinion(model, plan, trials)


def _same_tensors(a: nn.Module, b: nn.Module) -> bool:
    own, other = named_tensors(a), named_tensors(b)
    return own.keys() == other.keys() and all(torch.equal(own[n], other[n]) for n in own)


def _second_opinion(model: nn.Module, plan: Plan, trials: Sequence[Example]) -> Certificate:
    stirred = copy.deepcopy(model).double()
    _stir_(stirred)
    wide = [
        _map(example, lambda t: t.double() if t.is_floating_point() else t) for example in trials
    ]
    try:
        return _compare(
            _quiet(stirred, plan), _quiet(stirred, None), compact(stirred, plan), wide, plan,
            _EXACT_TOLERANCE,
        )  # fmt: skip
    except RuntimeError:
        # The model's own code insists on its precision: decide there, stirred.
        stirred = copy.deepcopy(model)
        _stir_(stirred)
        return _compare(
            _quiet(stirred, plan), _quiet(stirred, None), compact(stirred, plan), trials, plan
        )


def _compare(
    reference: nn.Module,
    original: nn.Module,
    small: nn.Module,
    trials: Sequence[Example],
    plan: Plan,
    tolerance: float = TOLERANCE,
) -> Certificate:
    error = moved = 0.0
    precision = "float32"
    for example in trials:
        with _norms_over_kept(reference, plan):
            want = _run(reference, example)
        before, have = _run(original, example), _run(small, example)
        if len(want) != len(have):
            raise VerificationError("The compact model returns another number of tensors.")
        for a, b, c in zip(want, before, have, strict=True):
            if a.shape != c.shape:
                raise VerificationError(
                    f"The compact model returns shape {tuple(c.shape)} instead of {tuple(a.shape)}."
                )
            precision = str(a.dtype).removeprefix("torch.")
            error = max(error, _difference(a, c))
            moved = max(moved, _difference(a, b))
    return Certificate(error, moved, len(trials), tolerance, precision, plan.exact)


def _run(model: nn.Module, example: Example) -> list[Tensor]:
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return [t for t in tensors_in(example.call(model)) if t.is_floating_point() and t.numel()]


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    scale = float(a.abs().max())
    gap = float((a - b).abs().max())
    if gap != gap:
        return float("inf")
    return gap / max(scale, 1e-12)


def _quiet(model: nn.Module, plan: Plan | None) -> nn.Module:
    """A copy in which every reader ignores the removed units (none, without a plan)."""
    quiet = copy.deepcopy(model)
    if plan is not None:
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


def _norms_over_kept(reference: nn.Module, plan: Plan) -> AbstractContextManager[object]:
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


def _stir_(model: nn.Module) -> None:
    """Give vanishing scales (zero-initialised gains, layer scale 1e-6) a size that shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and float(parameter.abs().max()) < _LIVE:
                noise = torch.rand(parameter.shape, generator=generator) + 0.5
                parameter.copy_(noise.to(parameter))


def _random_like(examples: Sequence[Example], count: int) -> list[Example]:
    generator = torch.Generator().manual_seed(0)

    def noise(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return torch.randn(t.shape, generator=generator).to(t)

    return [_map(examples[i % len(examples)], noise) for i in range(max(0, count))]


def _map(example: Example, change: Callable[[Tensor], Tensor]) -> Example:
    def one(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    return Example(tree_map(one, example.args), tree_map(one, dict(example.kwargs)))
