"""A forward pass by shape alone: the right shapes, and real values for models that look at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpgm
from fpgm import sketch

X = torch.randn(2, 3, 9, 8)
CONVOLUTION = torch.ops.aten.convolution.default


@given(
    dims=st.integers(1, 3),
    groups=st.sampled_from([1, 2]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    transposed=st.booleans(),
    bias=st.booleans(),
)
def test_a_sketched_convolution_has_the_shape_of_the_real_one(
    dims: int,
    groups: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    transposed: bool,
    bias: bool,
) -> None:
    x = torch.randn(2, 4, *range(6, 6 + dims))
    shape = (4, 6 // groups) if transposed else (6, 4 // groups)
    weight = torch.randn(*shape, *[kernel] * dims)
    shift = torch.randn(6) if bias else None
    more = [min(stride, 2) - 1 if transposed else 0] * dims
    args = (x, weight, shift, [stride] * dims, [padding] * dims, [dilation] * dims, transposed)
    try:
        real = CONVOLUTION(*args, more, groups)
    except RuntimeError:
        assert sketch.outline(CONVOLUTION, (*args, more, groups)) is None
        return
    found = sketch.outline(CONVOLUTION, (*args, more, groups))
    assert found is not None
    assert (found.shape, found.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("mm", [(3, 4), (4, 5)]), ("bmm", [(2, 3, 4), (2, 4, 5)]), ("addmm", [(5,), (3, 4), (4, 5)])],
)
def test_a_sketched_product_has_the_shape_of_the_real_one(
    name: str, shapes: list[tuple[int, ...]]
) -> None:
    operator = getattr(torch.ops.aten, name).default
    args = tuple(torch.randn(shape) for shape in shapes)
    found = sketch.outline(operator, args)
    assert found is not None
    assert found.shape == operator(*args).shape


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, b: (x[:, :2], w, b),  # wrong channels
        lambda x, w, b: (x.double(), w, b),  # another precision
        lambda x, w, b: (x, w, b[:2]),  # wrong bias
        lambda x, w, b: (x[..., :1], w, b),  # smaller than the kernel
        lambda x, w, b: (x[0], w, b),  # no batch
    ],
)
def test_what_does_not_fit_is_left_to_the_operator(change: Callable[..., Any]) -> None:
    x, w, b = change(X, torch.randn(4, 3, 3, 3), torch.randn(4))
    call = (x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert sketch.outline(CONVOLUTION, call) is None


class Convolutions(TorchDispatchMode):
    """Counts the convolutions that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed += func is CONVOLUTION
        return func(*args, **(kwargs or {}))


def test_a_plain_network_is_watched_without_computing_a_convolution() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with Convolutions() as mode:
        plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert mode.computed == 0
    assert plan.cuts


class Looking(nn.Module):
    """Widens its features on the way, if what it sees of them tells it to."""

    def __init__(self, look: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.look = look
        self.first = nn.Conv2d(3, 8, 3)
        self.wide = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.look(x):
            x = self.wide(x)
        return self.last(x)  # type: ignore[no-any-return]


def _quietly(x: Tensor) -> bool:
    try:
        return bool((x != 0).any())
    except Exception:
        return False


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.abs().max() > 0,
        lambda x: x.abs().max().item() > 0,
        lambda x: float(x.abs().sum()) != 0,
        lambda x: len(x.nonzero()) > 0,
        lambda x: x[x != 0].numel() > 0,
        lambda x: not torch.equal(x, torch.zeros_like(x)),
        lambda x: not torch.allclose(x, torch.zeros_like(x)),
        lambda x: len(x.unique()) > 1,
        lambda x: any(x.flatten().tolist()),
        lambda x: bool(np.any(x.numpy())),
        lambda x: bool(np.asarray(x).any()),
        lambda x: bool(np.from_dlpack(x).any()),
        _quietly,
    ],
)
def test_a_model_that_looks_at_values_is_watched_with_real_ones(
    look: Callable[[Tensor], bool],
) -> None:
    net = Looking(look).eval()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    layers = {layer for group in plan.groups for layer in group.layers}
    assert "wide" in layers  # a sketch would have gone round it
    assert fpgm.verify(net, plan, X).ok


def test_a_failed_sketch_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Looking(lambda x: x.max() > 0))
    net[2].first = nn.Conv2d(8, 8, 1)
    net.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    fpgm.plan(net, X, rate=0.5, align=1)
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not net[0]._forward_hooks


def test_weights_made_of_weights_are_computed() -> None:
    """What depends on no input keeps its values, so code may look at it."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)
            self.basis = nn.Parameter(torch.randn(3, 3))
            self.last = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            gram = self.basis @ self.basis.T
            assert float(gram.diagonal().min()) > 0
            return self.last(self.first(x) * gram.sum())  # type: ignore[no-any-return]

    net = Normed().eval()
    with Convolutions() as mode:
        plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert mode.computed == 0
    assert plan.cuts
