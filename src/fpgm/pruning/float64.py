"""Run a model in float64, and with random numbers that do not depend on widths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fpgm.utils.rng import seed_torch

_NARROW = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def to_double(value: Any) -> Any:
    """Cast floating-point and complex tensors to double precision; return all else as it is."""
    wide = _NARROW.get(value.dtype) if isinstance(value, Tensor) else None
    return value if wide is None else value.to(wide)


class Float64(TorchDispatchMode):
    """Computes in double precision even where code asks for less (`x.float()`, `torch.zeros`)."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        if kwargs.get("dtype") in _NARROW:
            kwargs = {**kwargs, "dtype": _NARROW[kwargs["dtype"]]}
        dtypes = _dtypes((*args, *kwargs.values()) if kwargs else args)
        if not _NARROW.keys().isdisjoint(dtypes) and not func._schema.is_mutable:
            args, kwargs = tree_map(to_double, (args, kwargs))
        out = func(*args, **kwargs)
        return out if dtypes else tree_map(to_double, out)


def _dtypes(values: Iterable[Any]) -> set[torch.dtype]:
    """List the dtypes of the tensors among arguments, also inside lists."""
    dtypes: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, Tensor):
            dtypes.add(value.dtype)
        elif isinstance(value, list | tuple):
            dtypes |= _dtypes(value)
    return dtypes


class ConstantNoise(TorchDispatchMode):
    """Replaces random numbers by constants, and seeds operators that draw positions at each call.

    A compact model draws fewer numbers than the original, so the same seed gives its channels
    different ones. Noise has the same distribution at every position, so a constant is as good a
    sample. A draw whose parameters the model computes becomes its expected value, so that an error
    in those parameters is still detected.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded not in func.tags and name not in _UNTAGGED:
            return func(*args, **kwargs)
        seed_torch(0)
        expected = _expected_value(name, args)
        if expected is not None:
            return expected
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        return out.fill_(1.0 if name.startswith("bernoulli") else 0.5)


_UNTAGGED = ("binomial", "_sample_dirichlet")
"""Operators that draw random numbers though torch does not say so."""


def _expected_value(name: str, args: tuple[Any, ...]) -> Any:
    """Return the expected value of a draw from the tensors it reads; None if it reads none."""
    x = args[0] if args and isinstance(args[0], Tensor) else None
    second = args[1] if len(args) > 1 else None
    if name == "normal" and (x is not None or isinstance(second, Tensor)):
        return args[0] + 0.5 * (1.0 if second is None else second)
    if x is None or not x.is_floating_point():
        return None
    if name in ("native_dropout", "_fused_dropout"):
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if name in ("poisson", "_standard_gamma", "alpha_dropout", "dropout"):
        return x.clone()
    if name == "_sample_dirichlet":
        return x / x.sum(-1, keepdim=True)
    if name == "binomial":
        return x * args[1]
    if name == "bernoulli" and second is None:
        return x.clone()
    if name in ("bernoulli", "bernoulli_") and isinstance(second, Tensor):
        mean = second.to(x).expand_as(x)
        return x.copy_(mean) if name == "bernoulli_" else mean.clone()
    if name.startswith("rrelu_with_noise"):
        return _leaky(name, *args)
    return None


def _leaky(
    name: str, x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, *_: Any
) -> Any:
    """Return a randomized leaky ReLU with its mean slope, and leave that slope as its noise.

    Arguments are those of `aten.rrelu_with_noise`; `name` tells its variants apart.
    """
    slope = (lower + upper) / 2
    slopes = torch.where(x > 0, 1.0, slope).to(x)
    out = x * slopes
    if name == "rrelu_with_noise_functional":
        return out, slopes
    noise.resize_(x.shape).copy_(slopes)
    return x.copy_(out) if name.endswith("_") else out
