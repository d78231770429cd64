"""Tell whether a forward pass recorded nothing new compared with another.

Most models compute the same structure in train mode as in eval mode. If every module returned the
same channels, and every operator with fixed sizes was at the same line and froze the same channels,
a dry run of one pass is enough for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fpgm.tracing.labels import Fields
from fpgm.tracing.trace_values import Factor, FixedSizeOp, Place

if TYPE_CHECKING:
    from fpgm.tracing.recorder import TraceRecorder


def is_repeat(trace: TraceRecorder, number: int, first: int) -> bool:
    """Tell whether the pass of this number recorded the same as an earlier one."""
    frozen = {(place[1:], reason) for place, reason in trace.frozen if place[0] == number}
    before = {(place[1:], reason) for place, reason in trace.frozen if place[0] == first}
    return (
        frozen <= before
        and _same_factors(trace.results.get(number, []), trace.results.get(first, []))
        and _same_returns(_returns_of(trace.returns, number), _returns_of(trace.returns, first))
        and _same_fixed_size_ops(
            _fixed_size_ops_of(trace, number), _fixed_size_ops_of(trace, first)
        )
    )


def _returns_of(returns: Mapping[Place, Factor], number: int) -> dict[Any, Factor]:
    return {place[1:]: factor for place, factor in returns.items() if place[0] == number}


def _fixed_size_ops_of(trace: TraceRecorder, number: int) -> dict[Any, FixedSizeOp]:
    return {
        (*place[1:], n): op for (place, n), op in trace.fixed_size_ops.items() if place[0] == number
    }


def _same_returns(one: Mapping[Any, Factor], other: Mapping[Any, Factor]) -> bool:
    return one.keys() == other.keys() and all(
        _same_fields(one[key].fields, other[key].fields) for key in one
    )


def _same_fixed_size_ops(one: Mapping[Any, FixedSizeOp], other: Mapping[Any, FixedSizeOp]) -> bool:
    return one.keys() == other.keys() and all(
        one[key].line == other[key].line
        and _same_fields(one[key].out.fields, other[key].out.fields)
        for key in one
    )


def _same_factors(some: Sequence[Factor], others: Sequence[Factor]) -> bool:
    return len(some) == len(others) and all(
        _same_fields(a.fields, b.fields) for a, b in zip(some, others, strict=True)
    )


def _same_fields(some: Fields, others: Fields) -> bool:
    return len(some) == len(others) and all(
        a is b or torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )
