"""The certificate: the compact model computes what the original does with those units silenced.

Both run on the examples and on inputs shuffled from them; outputs must agree to rounding, and the
reference must differ from the original, or the check would have proved nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fpgm.compact import check_fits, compact
from fpgm.errors import VerificationError
from fpgm.examples import Example, as_examples, tensors_in
from fpgm.plan import Plan
from fpgm.reference import FAINT, faint, follow_, norms_over_kept, silenced, stir_, wake_
from fpgm.tensors import unwrapped
from fpgm.turns import in_turn

TOLERANCE = 1e-4
"""Largest relative difference that float32 rounding explains in a deep network."""

_EXACT_TOLERANCE = 1e-8
_LEAST_MOVE = 1e-6


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
        return self.max_error <= self.tolerance and self.moved > max(
            _LEAST_MOVE, 100 * self.max_error
        )

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
    """Compare the compact model with the silenced original on the examples and shuffled ones.

    Works in the model's precision first. If that leaves doubt, or some parameters are so small
    that they hide what is behind them, or the units are masked already, again in float64 with
    those parameters stirred and the units filled with noise.
    """
    return certify(model, plan, as_examples(example_inputs), compacted, inputs)


@in_turn
def certify(
    model: nn.Module,
    plan: Plan,
    examples: Sequence[Example],
    compacted: nn.Module | None = None,
    inputs: int = 2,
) -> Certificate:
    """`verify` for examples that have been read already."""
    model = unwrapped(model)
    check_fits(model, plan)
    small = compact(model, plan) if compacted is None else unwrapped(compacted)
    trials = [*examples, *_shuffled(examples, inputs - 1)]
    found = _compare(model, plan, copy.deepcopy(small), trials, TOLERANCE)
    hidden = faint(model, plan)
    if found.ok and found.moved > FAINT and not hidden:
        return found
    wide = [_map(example, _widen) for example in trials]
    try:
        doubles = copy.deepcopy(model).double(), copy.deepcopy(small).double()
        return _stirred(*doubles, plan, wide, hidden, _EXACT_TOLERANCE)
    except VerificationError:
        # The model's own code insists on its precision: decide there.
        singles = copy.deepcopy(model), copy.deepcopy(small)
        return _stirred(*singles, plan, trials, hidden, TOLERANCE)


def _stirred(
    model: nn.Module,
    small: nn.Module,
    plan: Plan,
    trials: Sequence[Example],
    hidden: list[str],
    tolerance: float,
) -> Certificate:
    wake_(model, plan)
    follow_(small, plan, stir_(model, hidden))
    return _compare(model, plan, small, trials, tolerance)


def _widen(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _compare(
    model: nn.Module, plan: Plan, small: nn.Module, trials: Sequence[Example], tolerance: float
) -> Certificate:
    reference, original = silenced(model, plan), copy.deepcopy(model)
    error = moved = 0.0
    precision = ""
    compared = 0
    for number, example in enumerate(trials):
        with norms_over_kept(reference, plan):
            want = _run(reference, example, "silenced")
        before, have = _run(original, example, "original"), _run(small, example, "compact")
        if number and not all(bool(t.isfinite().all()) for t in before):
            continue  # a shuffled input may lie outside what the model accepts
        compared += 1
        _check_alike(want, have, plan)
        for i, (a, b, c) in enumerate(zip(want, before, have, strict=True)):
            if a.is_floating_point() or a.is_complex():
                precision = str(a.dtype).removeprefix("torch.")
                error = max(error, _difference(_kept(a, plan, i), c))
                moved = max(moved, _difference(a, b))
    return Certificate(error, moved, compared, tolerance, precision, plan.exact)


def _check_alike(want: Sequence[Tensor], have: Sequence[Tensor], plan: Plan) -> None:
    """Same number of tensors, same kinds, and the shapes the plan says."""
    if len(want) != len(have):
        raise VerificationError("The compact model returns another number of tensors.")
    for i, (a, c) in enumerate(zip(want, have, strict=True)):
        shape = _kept(a, plan, i).shape
        if shape != c.shape or a.dtype != c.dtype:
            pair = (c.dtype, a.dtype) if shape == c.shape else (tuple(c.shape), tuple(shape))
            what = "" if shape == c.shape else "shape "
            raise VerificationError(
                f"The compact model returns {what}{pair[0]} instead of {pair[1]}."
            )


def _kept(tensor: Tensor, plan: Plan, number: int) -> Tensor:
    """What the plan leaves of the model's output with this number."""
    for c in plan.outputs:
        if c.tensor == str(number):
            tensor = tensor.index_select(c.dim, torch.tensor(c.keep, device=tensor.device))
    return tensor


def _run(model: nn.Module, example: Example, which: str) -> list[Tensor]:
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return [t for t in tensors_in(example.call(model)) if t.numel()]
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise VerificationError(f"The {which} model does not run on the example: {text}") from error


def _difference(a: Tensor, b: Tensor) -> float:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    scale = float(a.abs().max())
    gap = float((a - b).abs().max())
    if gap != gap:
        return float("inf")
    return gap / max(scale, 1e-12)


def _shuffled(examples: Sequence[Example], count: int) -> list[Example]:
    """More inputs made of the examples' own values, so that they stay in the model's domain."""
    generator = torch.Generator().manual_seed(0)

    def shuffle(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        order = torch.randperm(t.numel(), generator=generator).to(t.device)
        return t.flatten()[order].reshape(t.shape)

    return [_map(examples[i % len(examples)], shuffle) for i in range(max(0, count))]


def _map(example: Example, change: Callable[[Tensor], Tensor]) -> Example:
    def one(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    return Example(tree_map(one, example.args), tree_map(one, dict(example.kwargs)))
