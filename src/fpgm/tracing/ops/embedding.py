"""Embeddings: every row of the table is a token, every column a channel that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule


def _embedding(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    _look_up(tracer, name, args[0], [args[1]], out)


def _bag(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    others = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)]
    _look_up(tracer, name, args[0], others, out[0])


def _look_up(
    tracer: LabelTracer, name: str, table: Tensor, others: Sequence[Tensor], out: Tensor
) -> None:
    for tensor in others:
        tracer.freeze(tracer.fields(tensor), f"'{name}' uses them as positions")
    info = tracer.unlabelled_parameter(table)
    if info is not None:
        info.name_axes([(lb.along(tracer.new_labels(table.shape[1]), 2, 1), "filter")])
    written = []
    for f in tracer.fields(table):
        if f.shape[0] > 1:
            tracer.freeze([f], f"'{name}' picks them by position")
        else:
            written.append(lb.lift(f.reshape(-1), out.ndim))
            if info is None:
                tracer.note_role(f, "filter", table)
    tracer.set(out, written)


RULES: dict[str, Rule] = {
    "embedding": _embedding,
    **{name: _bag for name in ("_embedding_bag", "_embedding_bag_forward_only")},
}
