"""Fourier transforms and complex numbers: channels along other dims pass through."""

from __future__ import annotations

from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.ops.base import Args, Kwargs, LabelTracer, Rule
from fpgm.tracing.ops.elementwise import combine


def _transform(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    x = args[0]
    dims = [d % x.ndim for d in args[1]]
    fields = []
    for f in tracer.fields(x):
        if lb.varies(f, dims):
            tracer.freeze([f], "a Fourier transform over channels mixes them")
        else:
            fields.append(f)
    tracer.set(out, fields)


def _as_real(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Add a last axis of two: the real and the imaginary part."""
    tracer.set(out, [f.unsqueeze(-1) for f in tracer.fields(args[0])])


def _as_complex(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Tie the two of the last axis, which become one number."""
    fields = []
    for f in tracer.fields(args[0]):
        if lb.axes(f) == [f.ndim - 1]:
            tracer.freeze([f], "real and imaginary parts form one number")
        else:
            tracer.tie(f, [f.ndim - 1])
            fields.append(f.select(-1, 0))
    tracer.set(out, fields)


def _view_dtype(tracer: LabelTracer, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Handle the same bytes as another dtype, with more or fewer numbers along the last axis."""
    x = args[0]
    fields = []
    for f in tracer.fields(x):
        if x.shape != out.shape and f.shape[-1] > 1:
            tracer.freeze([f], f"their bytes are viewed as {str(out.dtype).removeprefix('torch.')}")
        else:
            fields.append(f)
    tracer.set(out, fields)


RULES: dict[str, Rule] = {
    **{name: _transform for name in ("_fft_r2c", "_fft_c2r", "_fft_c2c")},
    "view_as_real": _as_real,
    "view_as_complex": _as_complex,
    "view.dtype": _view_dtype,
    **{name: combine for name in ("complex", "polar", "angle", "_conj_physical")},
}
