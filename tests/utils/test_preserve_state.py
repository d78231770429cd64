"""State that modules keep in plain attributes: planning leaves none, compact models fit theirs."""

import random
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.errors import ModelError
from fpgm.utils.copying import copy_model
from fpgm.utils.preserve_state import ModelState, preserve_state

X = torch.randn(2, 3, 8, 8)


class Cache:
    """An object that is no module."""

    def __init__(self) -> None:
        self.maps: dict[str, Tensor] = {}
        self.calls = 0


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.b = nn.Conv2d(8, 4, 1)
        self.register_buffer("steps", torch.zeros(()))
        self.total = torch.zeros(3)
        self.calls = 0
        self.last: Tensor | None = None
        self.maps: dict[tuple[int, ...], Tensor] = {}
        self.history: list[Tensor] = []
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.sizes: set[int] = set()
        self.pair = ([0], "x")
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += 1
        self.steps = self.steps + 1
        y = self.a(x).relu()
        self.last = y
        self.maps[tuple(x.shape)] = y
        self.history.append(y)
        self.recent.append(y)
        self.sizes.add(x.shape[-1])
        self.pair[0][0] += 1
        self.cache.calls += 1
        self.cache.maps["y"] = y
        self.new = y
        random.random()
        np.random.rand()  # noqa: NPY002
        torch.rand(1)
        out: Tensor = self.b(y)
        return out


def snapshot(net: Any) -> tuple[Any, ...]:
    return (
        net.calls, net.total.tolist(), float(net.steps), net.last, dict(net.maps),
        list(net.history), list(net.recent), set(net.sizes), net.pair[0][0], net.cache.calls,
        dict(net.cache.maps), sorted(vars(net)), net.training, random.getstate()[1],
        torch.get_rng_state().tolist(), list(np.random.get_state()[1]),  # noqa: NPY002
    )  # fmt: skip


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_planning_leaves_no_trace(used: bool, residual: Any) -> None:
    net = Stateful()
    if used:
        net(X)
    before = snapshot(net)
    plan = fpgm.plan(net, X[:1], rate=0.5, align=1, residual=residual)
    fpgm.compact(net, plan)
    assert str(snapshot(net)) == str(before)
    assert net.maps is not fpgm.compact(net, plan).maps


def test_flags_hooks_and_replaced_parameters_are_put_back() -> None:
    class Changes(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            self.register_forward_hook(lambda *_: None)
            self.weight.requires_grad_(False)
            self.weight.data = self.weight.data * 2
            return super().forward(x)

    net = Changes(3, 4, 1)
    before = net.weight.detach().clone()
    with preserve_state(net):
        net(X)
    assert torch.equal(net.weight, before)
    assert net.weight.requires_grad
    assert not net._forward_hooks


def test_what_was_cached_is_cut_or_dropped() -> None:
    net = Stateful().eval()
    with torch.no_grad():
        net(X)
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    keep = torch.tensor(plan.filters()["a"].keep)
    assert torch.equal(small.last, net.last.index_select(1, keep))
    assert torch.equal(small.maps[2, 3, 8, 8], small.last)
    assert [t.shape for t in small.history] == [(2, 4, 6, 6)]
    assert not small.recent
    assert net.last.shape == (2, 8, 6, 6)
    assert small.sizes == {8}
    assert fpgm.Plan.from_json(plan.to_json()) == plan


class Shaped(nn.Module):
    """Keeps a tensor of its input's size, and computes it again for another size."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.b = nn.Conv2d(8, 4, 1)
        self.shift: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        if self.shift is None or self.shift.shape[2:] != y.shape[2:]:
            self.shift = torch.ones_like(y)[:1] / y.shape[-1]
        out: Tensor = self.b(y * self.shift)
        return out


def test_a_cache_of_another_input_size_does_not_break_the_compact_model() -> None:
    net = Shaped().eval()
    other = torch.randn(1, 3, 12, 12)
    net(other)
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert fpgm.verify(net, plan, X, compacted=small).ok
    assert small.a.out_channels == 4
    with torch.no_grad():
        before = small(other)
        small.shift = None
        assert torch.allclose(before, small(other), atol=1e-6)
    net(X)  # now the example itself reads what an earlier pass has left: of fixed size
    with pytest.raises(ModelError, match="fixed size"):
        fpgm.plan(net, X, rate=0.5, align=1)


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (8, 1, 1), (2, 8, 6, 6)])
def test_a_plain_tensor_of_a_channel_width_is_never_wrong(shape: tuple[int, ...]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 1)
            self.a = nn.Conv2d(8, 8, 3)
            self.b = nn.Conv2d(8, 4, 1)
            self.scale = torch.rand(shape)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(self.stem(x).relu()) * self.scale)
            return out

    net = Scaled()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert [group.name for group in plan.groups if group.kept < group.units] == ["stem"]
    assert any("fixed size" in row.reason for row in plan.frozen)
    assert fpgm.verify(net, plan, X).ok


class Trainer:
    """Refers to a model and a large data set."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.model, self.images, self.steps = model, torch.zeros(size), [0]
        self.names = list(range(5000))


def test_a_data_set_that_a_model_refers_to_is_not_copied() -> None:
    class Trained(nn.Sequential):
        pass

    net = Trained(nn.Linear(2, 2))
    net.trainer = Trainer(net, 2**21)  # type: ignore[assignment]
    net.cache = torch.zeros(2**21)
    state = ModelState(net)
    kept = {id(tensor) for tensor, _ in state._values.values()}
    assert id(net.trainer.images) not in kept
    assert id(net.cache) in kept
    net.trainer.steps.append(1)
    state.restore()
    assert net.trainer.steps == [0]


def test_a_deeply_nested_list_is_put_back_and_not_copied() -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
    nested: list[Any] = []
    for _ in range(3000):
        nested = [nested]
    net.nested = nested  # type: ignore[assignment]
    with preserve_state(net):
        net.nested = None  # type: ignore[assignment]
    assert net.nested is nested
    with pytest.raises(ModelError, match="nested too deeply"):
        copy_model(net)


def test_functions_that_remember_results_forget_what_was_only_looked_at() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
            self.own = lru_cache(self.scale)

        @lru_cache  # noqa: B019
        def shift(self, k: int) -> Tensor:
            return self.a(torch.ones(k, 3)).mean()

        def scale(self, k: int) -> Tensor:
            return self.a(torch.ones(k, 3)).amax()

        def forward(self, x: Tensor) -> Tensor:
            factor = 2 if self.training else 1
            out: Tensor = self.b(self.a(x)) * self.own(factor) + self.shift(factor)
            return out

    net, x = Remembers(), torch.randn(2, 3)
    net(x)
    with preserve_state(net):
        net.eval()(x)
    assert net.own.cache_info().currsize == Remembers.shift.cache_info().currsize == 0
    net(x)
    with preserve_state(net):
        pass
    assert net.own.cache_info().currsize == Remembers.shift.cache_info().currsize == 1
