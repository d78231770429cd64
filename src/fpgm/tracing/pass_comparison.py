"""Whether a forward pass showed nothing that another one had not shown.

Most models compute the same structure in train mode as in eval mode. Where every module returned
the same channels, every operator with sizes of its own was at the same line and froze the same, a
dry run of one of the two passes says what the other would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fpgm.tracing.constraints import Factor, Place, Risk
from fpgm.tracing.labels import Fields

if TYPE_CHECKING:
    from fpgm.tracing.recorder import Watch


def repeats(seen: Watch, number: int, first: int) -> bool:
    """Whether the pass of this number showed just what the first one did."""
    frozen = {(place[1:], reason) for place, reason in seen.frozen if place[0] == number}
    before = {(place[1:], reason) for place, reason in seen.frozen if place[0] == first}
    return (
        frozen <= before
        and _same_factors(seen.results.get(number, []), seen.results.get(first, []))
        and _same_returns(_of_pass(seen.returns, number), _of_pass(seen.returns, first))
        and _same_risks(_risks_of(seen, number), _risks_of(seen, first))
    )


def _of_pass(found: Mapping[Place, Factor], number: int) -> dict[Any, Factor]:
    return {place[1:]: factor for place, factor in found.items() if place[0] == number}


def _risks_of(seen: Watch, number: int) -> dict[Any, Risk]:
    return {(*place[1:], n): risk for (place, n), risk in seen.risks.items() if place[0] == number}


def _same_returns(one: Mapping[Any, Factor], other: Mapping[Any, Factor]) -> bool:
    return one.keys() == other.keys() and all(
        _same_fields(one[key].fields, other[key].fields) for key in one
    )


def _same_risks(one: Mapping[Any, Risk], other: Mapping[Any, Risk]) -> bool:
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
