"""Convolutions and matrix products: which channels a weight writes and reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.labels import Fields
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.elementwise import combine_fields, note_sum
from fpgm.tracing.ops.norm import channel_row, label_parameter
from fpgm.utils.parameter_roles import Role

_READS_FIXED = "it reads the model's input or a tensor of fixed size"


def _convolution(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x, weight, bias = args[:3]
    transposed, groups = args[6], args[8]
    space = range(2, x.ndim)
    if _slides_along_channels(tracer, x, weight, out, space):
        return
    for f in tracer.fields(x):
        if f.shape[1] == 1 and lb.varies(f, space):
            tracer.freeze([f], "a convolution runs along the channels")
    reads = channel_row(tracer, x, 1)  # a vector reshaped to maps: each map is one channel
    reads = tracer.labels_read(x, weight, reads)
    if tracer.unlabelled_parameter(weight) is not None:
        writes = _label_weight(tracer, weight, reads, groups, transposed)
    else:
        writes = _relate_weight(tracer, weight, reads, groups, transposed)
    batch_fields = tuple(f for f in tracer.fields(x) if lb.axes(f) == [0])  # channels as images
    per_filter = math.prod(x.shape[2:] if transposed else out.shape[2:])
    tracer.note_cost(
        per_filter, [(tracer.fields(weight), weight.shape), (batch_fields, x.shape[:1])]
    )
    label_parameter(tracer, bias, writes, "shift")
    tracer.set(out, [*batch_fields, *([] if writes is None else [lb.along(writes, out.ndim, 1)])])


def _slides_along_channels(
    tracer: LabelTracer, x: Tensor, weight: Tensor, out: Tensor, space: Sequence[int]
) -> bool:
    """Handle ECA's gate: one small kernel slides along the channels laid out in space."""
    if x.shape[1] != 1 or weight.shape[0] != 1:
        return False
    rows = [(f, d) for f in tracer.fields(x) for d in space if lb.axes(f) == [d]]
    if len(rows) != 1 or len(tracer.fields(x)) != 1:
        return False
    field, dim = rows[0]
    if not tracer.is_zero(x):
        return False  # masking could not zero what neighbors see of a removed unit
    if out.shape[dim] != x.shape[dim] or not tracer.slide_along_channels(dim, field.reshape(-1)):
        return False
    tracer.set(out, [field])
    tracer.fields(weight)
    tracer.note_cost(out.numel() * weight.numel(), [])
    return True


def _label_weight(
    tracer: LabelTracer, weight: Tensor, reads: Tensor | None, groups: int, transposed: bool
) -> Tensor | None:
    """Assign the axes of a weight at its first use; return the labels it writes."""
    info = tracer.unlabelled_parameter(weight)
    assert info is not None
    outs = weight.shape[1] * groups if transposed else weight.shape[0]
    ins = weight.shape[0] if transposed else weight.shape[1] * groups
    if reads is None:
        reads = tracer.new_labels(ins)
        tracer.freeze([reads], _READS_FIXED)
    writes = tracer.new_labels(outs)
    if groups > 1:
        _couple_groups(tracer, reads, writes, groups)
    named = _weight_fields(weight, reads, writes, groups, transposed)
    roles: tuple[Role, Role] = ("depthwise" if groups == ins > 1 else "filter", "reads")
    info.name_axes(list(zip(named, roles, strict=True)))
    return writes if writes.numel() > 1 else None


def _weight_fields(
    weight: Tensor, reads: Tensor, writes: Tensor, groups: int, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return the fields a weight writes and reads; in a grouped weight one is per block."""
    per_row, per_block = (reads, writes) if transposed else (writes, reads)
    rows = lb.along(per_row, weight.ndim, 0)
    if groups == 1:
        columns = lb.along(per_block, weight.ndim, 1)
    elif len(per_block) == groups:
        columns = rows[:1]  # one column per group: the row's label is enough
    else:
        columns = per_block.reshape(groups, -1).repeat_interleave(len(per_row) // groups, 0)
        columns = columns.reshape(*columns.shape, *[1] * (weight.ndim - 2))
    return (columns, rows) if transposed else (rows, columns)


def _couple_groups(tracer: LabelTracer, reads: Tensor, writes: Tensor, groups: int) -> None:
    """Tie whole groups, or require that every group keeps equally many, whichever is finer."""
    ins, outs = reads.reshape(groups, -1), writes.reshape(groups, -1)
    whole = groups > min(ins.shape[1], outs.shape[1])
    if whole:
        tracer.tie(ins, [1])
        tracer.relate(outs, ins[:, :1])
    else:
        tracer.balance(ins)
        tracer.balance(outs)
        tracer.pair_groups(ins, outs)
    tracer.note_grouped_op(outs)


def _relate_weight(
    tracer: LabelTracer, weight: Tensor, reads: Tensor | None, groups: int, transposed: bool
) -> Tensor | None:
    """Relate the labels of a computed or shared weight to those of its input."""
    fields = tracer.fields(weight)
    if groups > 1 and transposed and weight.shape[1] == 1 and [lb.axes(f) for f in fields] == [[0]]:
        return _relate_one_column(tracer, fields[0].reshape(-1), reads, groups)
    write_dim, read_dim = (1, 0) if transposed else (0, 1)
    flat = [f for f in fields if len(lb.axes(f)) == 1]
    if groups > 1 and len(fields) == 2 and all(lb.axes(f) in ([0], [0, 1]) for f in fields):
        return _relate_grouped(tracer, weight, reads, groups, transposed)
    for f in fields:
        if lb.varies(f, range(2, weight.ndim)) or len(lb.axes(f)) > 1:
            tracer.freeze([f], _describe_entangled(tracer, weight))
    writes = next((f.reshape(-1) for f in flat if lb.axes(f) == [write_dim]), None)
    read = next((f.reshape(-1) for f in flat if lb.axes(f) == [read_dim]), None)
    if writes is None:
        _name_lost_filters(tracer, weight, write_dim)
    _note_use(tracer, weight, {write_dim: "filter", read_dim: "reads"})
    if reads is not None and read is None:
        if groups == 1:
            tracer.freeze([reads], "a convolution with a computed weight reads them")
    elif read is not None and reads is None:
        tracer.freeze([read], _READS_FIXED)
    elif read is not None and reads is not None:
        tracer.relate(reads if transposed else reads.reshape(groups, -1), read)
        tracer.note_read_by(weight, read)
    if groups > 1 and writes is not None:
        writes = writes if not transposed else writes.repeat(groups)
        if reads is not None:
            _couple_groups(tracer, reads, writes, groups)
        else:
            tracer.freeze([writes], _READS_FIXED)
    elif groups > 1 and reads is not None:
        tracer.freeze([reads], "a grouped convolution with a computed weight reads them")
    return writes


def _describe_entangled(tracer: LabelTracer, weight: Tensor) -> str:
    """Describe why a computed weight does not say which filters and inputs its channels are."""
    if tracer.is_constant(weight):
        return "a computed weight does not hold them along one axis"
    return "a kernel computed from activations is made of them"


def _name_lost_filters(tracer: LabelTracer, weight: Tensor, write_dim: int) -> None:
    """Freeze the filters of a weight whose labels were lost on the way (matrix_exp)."""
    parameter_infos = sorted(
        (tracer.parameter_infos[key] for key in tracer.source_parameters(weight)),
        key=lambda s: s.name,
    )
    for info in parameter_infos:
        for f in info.fields:
            if lb.axes(f) == [write_dim] and f.numel() == weight.shape[write_dim]:
                tracer.freeze([f], "a computed weight holds them")
                tracer.note_role(f, "filter", weight)


def _note_use(tracer: LabelTracer, weight: Tensor, uses: dict[int, Role]) -> None:
    """Note the role of each axis in this use; a tied weight may write and read along one."""
    info = tracer.parameter_infos.get(id(weight))
    for i, f in enumerate(tracer.fields(weight)):
        use = uses.get(lb.axes(f)[0]) if len(lb.axes(f)) == 1 else None
        if use is None:
            continue
        if info is None:
            tracer.note_role(f.reshape(-1), use, weight)
        elif info.roles[i] == "scale":
            info.roles[i] = use
        elif info.roles[i] != use and (info.roles[i], use) != ("depthwise", "filter"):
            info.roles[i] = "both"


def _relate_grouped(
    tracer: LabelTracer, weight: Tensor, reads: Tensor | None, groups: int, transposed: bool
) -> Tensor | None:
    """Relate a grouped weight in a later use: a shared module, another example, a dry run.

    If one column per group is left, both fields are along the rows, and their order tells them
    apart.
    """
    blocks, rows = tracer.fields(weight) if transposed else reversed(tracer.fields(weight))
    per_row = rows.reshape(-1)
    per_block = blocks.reshape(groups, -1, weight.shape[1])[:, 0].reshape(-1)
    own_reads, writes = (per_row, per_block) if transposed else (per_block, per_row)
    if reads is None:
        tracer.freeze([own_reads], _READS_FIXED)
    else:
        tracer.relate(own_reads, reads)
    tracer.note_grouped_op(writes.reshape(groups, -1))
    return writes


def _relate_one_column(
    tracer: LabelTracer, row: Tensor, reads: Tensor | None, groups: int
) -> Tensor:
    """Relate a transposed weight with one output per group in a later use."""
    if reads is None:
        tracer.freeze([row], _READS_FIXED)
    else:
        tracer.relate(row, reads)
    writes = row.reshape(groups, -1)[:, 0]
    tracer.note_grouped_op(writes.reshape(groups, 1))
    return writes


def _mm(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    _product(tracer, args[0], args[1], out)


def _addmm(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    bias, a, b = args[:3]
    _product(tracer, a, b, out)
    row = [f for f in tracer.fields(out) if lb.axes(f) == [out.ndim - 1]]
    if bias.ndim == 1:
        label_parameter(tracer, bias, row[0].reshape(-1) if row else None, "shift")
    else:
        terms = [tracer.fields(out), tracer.fields(bias)]
        tracer.set(out, combine_fields(tracer, [out, bias], tuple(out.shape)))
        note_sum(tracer, [bias, a, b], terms, out)


def _sparse_addmm(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Multiply by a sparse matrix; `torch.sparse.mm` adds zeros to the product, times zero."""
    beta = args[3] if len(args) > 3 else kwargs.get("beta", 1)
    if beta == 0:
        _product(tracer, args[1], args[2], out)
    else:
        _addmm(tracer, name, args, kwargs, out)


def _product(tracer: LabelTracer, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Label […, m, k] @ […, k, n]: rows and columns pass through, k is read."""
    last, inner = a.ndim - 1, b.ndim - 2
    fa = _one_axis(tracer, tracer.fields(a), last, last - 1, tracer.is_constant(b))
    fb = _one_axis(tracer, tracer.fields(b), inner, inner + 1, tracer.is_constant(a))
    read_a = [f for f in fa if f.shape[last] > 1]
    read_b = [f for f in fb if f.shape[inner] > 1]
    rows = [f for f in fa if f.shape[last] == 1]
    columns = [f for f in fb if f.shape[inner] == 1]
    _contract(tracer, a, b, read_a, read_b)
    read = {id(f) for f in (*read_a, *read_b)}
    alone = _relate_batches(tracer, fa, b, fb, read)
    alone |= _relate_batches(tracer, fb, a, fa, read)
    rows, columns = ([f for f in fields if id(f) not in alone] for fields in (rows, columns))
    if tracer.is_constant(a) != tracer.is_constant(b):  # of two weights, uses decide
        weight, written = (a, rows) if tracer.is_constant(a) else (b, columns)
        for f in written:
            tracer.note_role(f, "filter", weight)
    batches = range(b.ndim - 2)
    per_matrix = tuple(f for f in fb if not lb.varies(f, batches))
    per_batch = [f for f in fb if set(lb.axes(f)) <= set(batches)]
    tracer.note_cost(1, [((*rows, *per_batch), a.shape[:-1]), (per_matrix, b.shape[-2:])])
    tracer.set(out, _merge_batches(tracer, rows, columns))


def _one_axis(
    tracer: LabelTracer, fields: Fields, read: int, passed: int, by_weight: bool
) -> Fields:
    """Leave no channels both on the axis that is read and on another.

    Where they also lie on the axis that passes through, a sum over branches makes the k-th channels
    of the branches one unit (a graph convolution). Where they lie along a batch of matrices, a
    weight with one matrix per group reads the same channels of every group.
    """
    passed_fields = []
    for f in fields:
        others = [d for d in lb.axes(f) if d != read]
        tied = [read] if passed in others else others if by_weight else []
        if f.shape[read] > 1 and tied:
            tracer.tie(f, tied)
            for d in tied:
                f = f.narrow(d, 0, 1)
        passed_fields.append(f)
    return tuple(passed_fields)


def _relate_batches(
    tracer: LabelTracer, fields: Fields, other: Tensor, its: Fields, read: set[int]
) -> set[int]:
    """Relate channels along the batch axis to partners there that pass through too.

    Returns the ids of the fields that have none, and do not distinguish channels after the product.
    """
    alone = set()
    for f in fields:
        batches = [d for d in lb.axes(f) if d < other.ndim - 2]
        partners = [g for g in its if lb.varies(g, batches)]
        if not partners and any(other.shape[d] > 1 for d in batches):
            tracer.freeze([f], "they are combined with a tensor of fixed size")
            if lb.axes(f) == batches:
                alone.add(id(f))
        if id(f) in read or any(id(g) in read for g in partners):
            tracer.freeze([f, *partners] if batches else [], "a product of activations reads them")
    return alone


def _merge_batches(tracer: LabelTracer, rows: list[Tensor], columns: list[Tensor]) -> list[Tensor]:
    merged = list(rows)
    for c in columns:
        for i, r in enumerate(merged):
            if lb.varies(r, lb.axes(c)):
                tracer.relate(r, c)
                shape = [max(x, y) for x, y in zip(r.shape, c.shape, strict=True)]
                merged[i] = r.expand(shape)
                break
        else:
            merged.append(c)
    return merged


def _contract(
    tracer: LabelTracer, a: Tensor, b: Tensor, read_a: list[Tensor], read_b: list[Tensor]
) -> None:
    """Handle labels along the contracted axis: a weight reads them, or they are frozen."""
    flat = all(len(lb.axes(f)) == 1 for f in (*read_a, *read_b))
    one_weight = tracer.is_constant(a) != tracer.is_constant(b)
    if flat and one_weight and len(read_a) == len(read_b) == 1:
        tracer.relate(read_a[0].reshape(-1), read_b[0].reshape(-1))
        weight, read = (b, read_b) if tracer.is_constant(b) else (a, read_a)
        tracer.note_role(read[0], "reads", weight)
        tracer.note_read_by(weight, read[0].reshape(-1))
    elif one_weight and not (read_b if tracer.is_constant(a) else read_a):
        tracer.freeze([*read_a, *read_b], _READS_FIXED)
    else:
        kind = "weights" if tracer.is_constant(a) and tracer.is_constant(b) else "activations"
        tracer.freeze([*read_a, *read_b], f"a product of {kind} reads them")


def _vector(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    for tensor in args[:2]:
        tracer.freeze(tracer.fields(tensor), f"'{name}' sums over them (as spectral norm does)")


def _attention(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
    query, key, value = args[:3]
    for tensor in (query, key, value):
        tracer.freeze(tracer.fields(tensor), "attention reads them")
    result = out[0] if isinstance(out, tuple | list) else out
    # Values pass through by channel; along the tokens the output is the queries'.
    values = [f for f in tracer.fields(value) if f.shape[-2] == 1 and _fits(f, result)]
    tracer.set(result, values)
    # Every query meets every key, and so every row of the output every row of the values.
    tracer.note_cost(key.shape[-2], [(tracer.fields(query), query.shape)])
    tracer.note_cost(key.shape[-2], [(tuple(values), (*query.shape[:-1], value.shape[-1]))])


def _fits(field: Tensor, out: Tensor) -> bool:
    """Tell whether a field can lie on a tensor: fewer heads of values serve several of queries."""
    return field.ndim == out.ndim and all(
        n in (1, size) for n, size in zip(field.shape, out.shape, strict=True)
    )


RULES: dict[str, Rule] = {
    "convolution": _convolution,
    **{name: _mm for name in ("mm", "bmm")},
    **{name: _addmm for name in ("addmm", "baddbmm")},
    "_sparse_addmm": _sparse_addmm,
    **{name: _vector for name in ("mv", "dot", "vdot")},
    **{
        name: _attention
        for name in ("_scaled_dot_product_flash_attention_for_cpu",
                     "scaled_dot_product_attention",
                     "_scaled_dot_product_flash_attention", "_scaled_dot_product_math",
                     "_scaled_dot_product_efficient_attention",
                     "_scaled_dot_product_attention_math",
                     "_scaled_dot_product_fused_attention_overrideable",
                     "_scaled_dot_product_cudnn_attention")
    },
}  # fmt: skip
