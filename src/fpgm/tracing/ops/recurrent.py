"""LSTMs in one operator: their input may lose channels, their own units are frozen."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.norm import channel_row

_STAYS = "the units of an LSTM are not pruned"


def _lstm(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Label [time, batch, channels] times a weight of [4 · units, channels]."""
    x, weight, recurrent_weight, *biases = args[:5]
    last = x.ndim - 1
    tracer.freeze([f for f in tracer.fields(x) if f.shape[last] == 1], f"'{name}' reads them")
    reads = channel_row(tracer, x, last)
    info = tracer.unlabelled_parameter(weight)
    if info is not None:
        gates = tracer.new_labels(weight.shape[0])
        named = tracer.new_labels(weight.shape[1]) if reads is None else reads
        info.name_axes([(lb.along(gates, 2, 0), "filter"), (lb.along(named, 2, 1), "reads")])
    tracer.freeze([f for f in tracer.fields(weight) if lb.axes(f) == [0]], _STAYS)
    columns = [f.reshape(-1) for f in tracer.fields(weight) if lb.axes(f) == [1]]
    if reads is None:
        tracer.freeze(columns, "it reads the model's input or a tensor of fixed size")
    elif columns:
        tracer.relate(columns[0], reads)
    else:
        tracer.freeze([reads], "a weight of fixed size reads them")
    for tensor in (recurrent_weight, *biases, *args[5:7]):
        if isinstance(tensor, Tensor):
            tracer.freeze(tracer.fields(tensor), _STAYS)


RULES: dict[str, Rule] = {"mkldnn_rnn_layer": _lstm}
