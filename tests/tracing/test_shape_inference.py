"""A forward pass by shape alone: the right shapes, and real values for models that look at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpgm
from fpgm.tracing import shape_inference

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
        assert shape_inference.infer_shape(CONVOLUTION, (*args, more, groups)) is None
        return
    results = shape_inference.infer_shape(CONVOLUTION, (*args, more, groups))
    assert results is not None
    assert (results.shape, results.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("mm", [(3, 4), (4, 5)]), ("bmm", [(2, 3, 4), (2, 4, 5)]), ("addmm", [(5,), (3, 4), (4, 5)])],
)
def test_a_sketched_product_has_the_shape_of_the_real_one(
    name: str, shapes: list[tuple[int, ...]]
) -> None:
    operator = getattr(torch.ops.aten, name).default
    args = tuple(torch.randn(shape) for shape in shapes)
    results = shape_inference.infer_shape(operator, args)
    assert results is not None
    assert results.shape == operator(*args).shape


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
    assert shape_inference.infer_shape(CONVOLUTION, call) is None


@pytest.mark.parametrize(
    "look",
    [
        lambda x: bool(x.max() > 0),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
    ],
)
def test_looking_at_values_asks_for_real_ones(look: Callable[[Tensor], Any]) -> None:
    class Outlines(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            shape_inference.infer_shape(func, args)
            return func(*args, **(kwargs or {}))

    with pytest.raises(shape_inference.ValuesNeededError), Outlines():
        look(X)


class Minding(nn.Module):
    """A size fixed in the code, so that it is replayed, behind something that minds its values."""

    def __init__(self, mind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mind = mind
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 12, 1)
        self.last = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mind(self.second(self.first(x)))
        return self.last(x.permute(0, 2, 3, 1).reshape(-1, self.last.in_features))  # type: ignore[no-any-return]


def _quietly(x: Tensor) -> Tensor:
    try:
        return x * 2 if bool((x[:1, :1] != 0).any()) else x[:, :1]
    except Exception:
        return x[:, :1]


def _scaled_by_inverse(x: Tensor) -> Tensor:
    corner = x[0, 0, :2, :2] @ torch.eye(2)
    return x + torch.linalg.inv(corner).mean() * 0


def _checked(x: Tensor) -> Tensor:
    if not float(x[0, 0].detach().abs().max()) > 0:
        raise ValueError("dead input")
    return x


@pytest.mark.parametrize("mind", [_quietly, _scaled_by_inverse, _checked])
def test_a_model_that_reads_values_is_run_with_values(mind: Callable[[Tensor], Tensor]) -> None:
    net = Minding(mind).eval()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    layers = {layer for group in plan.groups for layer in group.layers}
    assert "first" in layers
    assert fpgm.verify(net, plan, X).ok


def test_channels_last_code_is_replayed_as_it_runs() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.first(x).permute(0, 2, 3, 1).view(-1, self.last.in_features)
            return self.last(rows)  # type: ignore[no-any-return]

    net = Rows().to(memory_format=torch.channels_last).eval()
    x = X.to(memory_format=torch.channels_last)
    plan = fpgm.plan(net, x, rate=0.5, align=1)
    assert [group.layers for group in plan.groups] == [("first",)]
    assert fpgm.verify(net, plan, x).ok


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_planning_does_not_initialise_a_model_from_its_first_input(residual: Any) -> None:
    class FirstInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 8, 1)
            self.first = nn.Conv2d(8, 8, 3)
            self.scale = nn.Parameter(torch.ones(1))
            self.started = False
            self.last = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.body(x))
            if not self.started:
                with torch.no_grad():
                    self.scale.copy_(1 / x.std())
                self.started = True
            return self.last(x * self.scale)  # type: ignore[no-any-return]

    net = FirstInput().eval()
    plan = fpgm.plan(net, X, rate=0.5, align=1, residual=residual)
    assert float(net.scale.detach()) == 1
    assert not net.started
    assert fpgm.verify(net, plan, X).ok


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.add.Tensor, (X, torch.randn(2, 3, 1, 1))),
        (ATEN.mul.Tensor, (torch.randn(2, 3, 1, 1), X)),
        (ATEN.add_.Tensor, (X.clone(), X)),
        (ATEN.mean.dim, (X, [-1, -2])),
        (ATEN.mean.dim, (X, [2, 3], True)),
        (ATEN.sum.dim_IntList, (X, [1])),
        (ATEN.cat.default, ([X, X[:, :2].clone()], 1)),
        (ATEN.cat.default, ([X, X],)),
        (ATEN.avg_pool2d.default, (X, [3, 3], [2, 2], [1, 1])),
        (ATEN.avg_pool2d.default, (X, [2], [], [0], True, False)),
    ],
)
def test_an_inferred_result_has_the_layout_of_the_real_one(func: Any, args: Any) -> None:
    inferred = shape_inference.infer_shape(func, args)
    real = func(*args)
    assert isinstance(inferred, Tensor)
    assert (inferred.shape, inferred.stride(), inferred.dtype) == (
        real.shape,
        real.stride(),
        real.dtype,
    )


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (ATEN.add.Tensor, (X, X.double()), {}),
        (ATEN.add.Tensor, (X, torch.randn(8)), {}),
        (ATEN.add_.Tensor, (X.clone(), torch.randn(2, 3, 1, 1)), {}),
        (ATEN.mean.dim, (X, [1]), {"dtype": torch.float64}),
        (ATEN.mean.dim, (X, [4]), {}),
        (ATEN.sum.dim_IntList, (X, None), {}),
        (ATEN.cat.default, ([X, X[:, :2]], 0), {}),
        (ATEN.cat.default, ([X, torch.empty(0)], 1), {}),
        (ATEN.avg_pool2d.default, (X.to(memory_format=torch.channels_last), [3, 3]), {}),
        (ATEN.avg_pool2d.default, (X, [3, 3], [1, 1], [0, 0], False, True, 2), {}),
    ],
)
def test_unusual_calls_are_left_to_the_operator(
    func: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    assert shape_inference.infer_shape(func, args, kwargs) is None


class SmallAuxiliary(nn.Module):
    """An auxiliary head that only training runs, and only on larger inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.auxiliary = nn.Conv2d(8, 4, 9)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)


def test_an_error_of_shapes_is_not_tried_again_with_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fpgm.tracing import recorder

    ran: list[bool] = []
    run = recorder._run

    def count(trace: Any, *more: Any) -> None:
        ran.append(trace.values)
        run(trace, *more)

    monkeypatch.setattr(recorder, "_run", count)
    plan = fpgm.plan(SmallAuxiliary(), torch.randn(1, 3, 8, 8), rate=0.5, align=1)
    assert ran == [False, False]
    assert "Kernel size" in plan.notes[0]
