"""One number, kernel or row of positions, copied for every channel (`expand`, `repeat`).

Copies of one number may be channels, like a constant: a blur applies the same kernel to each
channel. The number of copies may be fixed in the user's code, so the results are `FIXED_SIZE_OPS`
like any expansion.
"""

from __future__ import annotations

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops import movement as move
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule


def _copies(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    move.RULES[name](tracer, name, args, kwargs, out)
    x = args[0]
    if x.ndim and x.is_floating_point() and not tracer.is_constant(x):
        return  # a gate expanded over its image: this creates no channels
    sizes = (1,) * (out.ndim - x.ndim) + tuple(x.shape)
    fresh = [
        lb.along(tracer.new_labels(size), out.ndim, d)
        for d, (before, size) in enumerate(zip(sizes, out.shape, strict=True))
        if before == 1 and size > 1
    ]
    tracer.set(out, [*tracer.fields(out), *fresh])


RULES: dict[str, Rule] = {"expand": _copies, "repeat": _copies}
