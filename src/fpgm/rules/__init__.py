"""One table from ATen operator to what it does to labels.

A rule receives the tracer, the call and its result; it reads the labels of the arguments, tells
the tracer what it found (`relate`, `tie`, `balance`, `freeze`, `work`) and labels the result. An
operator that is in no table is never guessed at: the labels that reach it are frozen, with its
name as the reason. `TABLE` can be queried for what is supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fpgm.rules import contract, create, move, normalise, pieces, pointwise, reduce, space, zeros
from fpgm.rules.rule import Args, Kwargs, Rule

if TYPE_CHECKING:
    from fpgm.tracer import Tracer

TABLE: dict[str, Rule] = {
    **move.RULES,
    **pieces.RULES,
    **create.RULES,
    **pointwise.RULES,
    **contract.RULES,
    **normalise.RULES,
    **reduce.RULES,
    **space.RULES,
}

RISKY = move.RISKY | pieces.RISKY | create.RISKY
"""Operators whose sizes may be constants of the user's code; the tracer is told what they made."""

_found: dict[Any, tuple[str, Rule]] = {}


def apply(
    tracer: Tracer,
    func: Any,
    args: Args,
    kwargs: Kwargs,
    out: Any,
    inputs: Sequence[Tensor],
) -> None:
    """Let the operator's rule move labels from its arguments (`inputs`: the tensors) to `out`."""
    if func not in _found:
        _found[func] = _look_up(func)
    name, rule = _found[func]
    rule(tracer, name, args, kwargs, out)
    if name in RISKY:
        source = args[0] if args and isinstance(args[0], Tensor) else None
        for result in tensors((out,)):
            tracer.risky(result, source)
    for result in tensors((out,)):
        tracer.mark_zero(result, zeros.after(tracer, name, inputs, result))


def tensors(values: Any) -> Iterator[Tensor]:
    """Tensors among the arguments, lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def _look_up(func: Any) -> tuple[str, Rule]:
    name = func._schema.name.removeprefix("aten::")
    for candidate in (name, name.removesuffix("_")):
        if candidate in TABLE:
            return name, TABLE[candidate]
    if torch.Tag.pointwise in func.tags:
        return name, pointwise.combine
    return name, _unknown


def _unknown(tracer: Tracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    for tensor in tensors((*args, *kwargs.values())):
        tracer.freeze(tracer.fields(tensor), f"'{name}' has no pruning rule")
