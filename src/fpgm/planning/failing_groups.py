"""Find the groups responsible when a compact model differs from the masked original.

A certificate says that outputs differ, but not why. So plans that remove the units of only some
groups are verified, halving the groups each time, until one group remains, or a few that fail only
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from fpgm.errors import VerificationError
from fpgm.pruning.compaction import compact
from fpgm.pruning.float64 import Float64, to_double
from fpgm.pruning.masked_reference import masked_copy, norms_over_kept
from fpgm.pruning.output_differences import distance, form_problem
from fpgm.pruning.plan import Plan
from fpgm.pruning.verification import certify
from fpgm.utils.example_inputs import Example, map_tensors
from fpgm.utils.outputs import read_outputs
from fpgm.utils.preserve_state import preserve_state
from fpgm.utils.rng import seed_torch
from fpgm.utils.thread_lock import suppress_warnings, with_global_lock

Part = TypeVar("Part")

_ALIKE = 1e-6
"""Relative; rounding is far below, a width that was used as a number above."""


def find_difference(model: nn.Module, plan: Plan, examples: Sequence[Example]) -> str | None:
    """Describe how the compact model differs from the masked original; None if it does not."""
    try:
        certificate = certify(model, plan, examples)
    except VerificationError as error:
        return str(error)
    if not certificate.differs:
        return None
    return certificate.problem or f"outputs would differ by {certificate.max_error:.1e}"


@with_global_lock
@torch.no_grad()
def runs_alike(model: nn.Module, plan: Plan, example: Example) -> bool:
    """Compare the compact model with the masked original in one pass each, as the weights are.

    In double precision; not alike if the model's code does not run in it.
    """
    outputs = []
    try:
        small, masked = compact(model, plan).double(), masked_copy(model, plan).double()
        wide = map_tensors(example, to_double)
        quietly, double = suppress_warnings(), Float64()  # type: ignore[no-untyped-call]
        with preserve_state(masked), norms_over_kept(masked, plan), quietly, double:
            for net in (masked, small):
                seed_torch(0)
                outputs.append(list(read_outputs(wide.call(net.eval()))))
    except Exception:  # the model's own code may raise anything
        return False
    want, have = outputs
    return not form_problem(want, have) and all(
        distance(a, b) < _ALIKE for a, b in zip(want, have, strict=True)
    )


def find_failing(parts: Sequence[Part], fails: Callable[[Sequence[Part]], bool]) -> list[Part]:
    """Return a small subset of parts that still fails, given that all of them do (delta debugging).

    >>> find_failing([1, 2, 3, 4, 5, 6], lambda some: 5 in some)
    [5]
    >>> find_failing([1, 2, 3, 4, 5, 6], lambda some: 2 in some and 5 in some)
    [2, 5]
    """
    left = list(parts)
    pieces = 2
    while len(left) > 1:
        size = -(-len(left) // pieces)
        chunks = [left[start : start + size] for start in range(0, len(left), size)]
        others = [[p for p in left if p not in chunk] for chunk in chunks] if pieces > 2 else []
        smaller = next((some for some in (*chunks, *others) if fails(some)), None)
        if smaller is not None:
            left, pieces = smaller, 2
        elif pieces >= len(left):
            break
        else:
            pieces = min(len(left), 2 * pieces)
    return left
