"""Copies of models that `copy.deepcopy` fails on, or whose copies would refer to the original."""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.utils.copying import copy_model
from fpgm.utils.modules import named_tensors

X = torch.randn(2, 3, 8, 8)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.b: Any = nn.Conv2d(8, 8, 3)
        self.c = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x).relu()).relu())
        return out


class Locked(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.ready = threading.Event()
        self.log = logging.getLogger("net")

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


class CopiesItself(Chain):
    def __deepcopy__(self, memo: object) -> "CopiesItself":
        new = type(self)()
        new.load_state_dict(self.state_dict())
        return new


class Uncopyable(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (n for n in range(3))
        self.parts = deque([threading.RLock(), self.numbers], maxlen=4)


class RefersWeakly(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.first = weakref.ref(self.a)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first()
        assert first is not None
        out: Tensor = self.c(self.b(first(x)))
        return out


class HoldsLambda(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.step = lambda x, layer=self.a: self.b(layer(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.step(x))
        return out


class Remembers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.a(x))
        return super().forward(x)


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.fx.symbolic_trace(Chain())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class ByFunction(nn.Module):
    """Runs its layers by a function that refers to them in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)
        layers, method = [self.a, self.b], self.features
        variants: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
            "list": lambda: lambda x: layers[1](layers[0](x).relu()),
            "method": lambda: lambda x: method(x),
            "partial": lambda: partial(lambda k, x: self.features(x) * k, 2.0),
            "compiled method": lambda: torch.compile(self.features, backend="eager"),
            "remembered": lambda: lambda x: self.features(x) * remembered(2).sum(),
        }
        remembered = lru_cache(self.scale)
        self.run = variants[way]()

    def scale(self, k: int) -> Tensor:
        return self.c.weight[:, 0] * k

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu())
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.run(x).relu())
        return out


VARIANTS = ("list", "method", "partial", "compiled method", "remembered")


@pytest.mark.parametrize("way", VARIANTS)
def test_a_copys_functions_call_its_own_layers(way: str) -> None:
    net = ByFunction(way)
    copied = copy_model(net)
    before = copied(X)
    for tensor in named_tensors(net).values():
        tensor.data.add_(1)
    assert torch.equal(copied(X), before)
    copied(X).sum().backward()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("way", VARIANTS[:-1])
def test_layers_that_a_function_runs_are_pruned(way: str) -> None:
    net = ByFunction(way)
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert fpgm.verify(net, plan, X, compacted=small).ok
    assert small(X).shape == (2, 4, 4, 4)
    assert [cut.kept for cut in plan.cuts if cut.role == "filter"] == [4, 4]


def test_a_function_that_holds_itself_and_the_model_is_copied() -> None:
    class Walks(Chain):
        def __init__(self) -> None:
            super().__init__()

            def walk(x: Tensor, left: int) -> Tensor:
                return walk(self.b(x), left - 1) if left else x

            self.walk = walk

    net = Walks()
    copied: Any = copy_model(net)
    net.b.weight.data.zero_()
    assert copied.walk(torch.ones(1, 8, 5, 5), 2).abs().sum() > 0


def test_a_compiled_part_is_pruned_and_the_original_unchanged() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    net[1].compile(backend="eager")
    net.compile(backend="eager")
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    small = fpgm.prune(net, X, rate=0.5, align=1)
    assert small(X).shape == (2, 4, 6, 6)
    assert small[1].num_features == 4  # type: ignore[index]
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    "kind",
    [Chain, Locked, CopiesItself, Uncopyable, RefersWeakly, HoldsLambda, Remembers, Wraps],
)
def test_odd_modules_are_pruned_and_certified(kind: type[nn.Module]) -> None:
    net = kind()
    net(X)  # a cached result with a graph is one more thing deepcopy refuses
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert fpgm.verify(net, plan, X, compacted=small).ok
    kept = {tuple(p.shape) for p in small.parameters() if p.ndim == 4}
    assert kept == {(4, 3, 3, 3), (4, 4, 3, 3), (4, 4, 1, 1)}


def test_a_copy_refers_to_itself_after_any_model_was_compiled() -> None:
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.zeros(1, 2))  # changes nn.Module itself
    net = RefersWeakly()
    new = copy_model(net)
    assert new.first() is new.a
    assert new.a is not net.a


@pytest.mark.parametrize("kind", [Locked, CopiesItself, Uncopyable, RefersWeakly, HoldsLambda])
def test_a_copy_shares_no_weights(kind: type[nn.Module]) -> None:
    net = kind()
    copied = copy_model(net)
    before = copied(X)
    for tensor in named_tensors(net).values():
        tensor.data.add_(1)
    assert torch.equal(copied(X), before)
    assert not torch.equal(net(X), before)


def test_locks_are_new_and_what_cannot_be_copied_is_shared() -> None:
    net = Uncopyable()
    copied = copy_model(net)
    assert isinstance(copied, Uncopyable)
    assert copied.numbers is net.numbers
    assert copied.parts[0] is not net.parts[0]
    assert copied.parts.maxlen == 4
    locked = Locked()
    with locked.lock:
        assert copy_model(locked)(X).shape == (2, 4, 4, 4)  # a shared lock would wait for ever


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_part_is_not_pruned_and_the_rest_shrinks() -> None:
    class Scripted(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))  # type: ignore[assignment]
            self.b = torch.jit.script(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()))

    net = Scripted()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan)
    assert fpgm.verify(net, plan, X, compacted=small).ok
    assert small.a[0].out_channels == 4  # type: ignore[union-attr,index]
    assert any("scripted" in row.reason for row in plan.frozen)
    with torch.no_grad():
        before = small(X)
        next(net.b.parameters()).add_(1)
        assert torch.equal(small(X), before)


def traced(layers: nn.Module) -> nn.Module:
    module: nn.Module = torch.jit.trace(layers, torch.randn(2, 8, 4, 4))  # type: ignore[no-untyped-call]
    return module


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, traced])
def test_training_a_copy_of_a_scripted_part_leaves_the_original_alone(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    net: Any = Chain()
    net.a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    net.b = compiled(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()))
    next(net.b.parameters()).requires_grad_(False)
    small = fpgm.prune(net, X, rate=0.5, align=1)
    assert all(p.is_leaf for p in small.parameters())
    assert not next(small.b.parameters()).requires_grad  # type: ignore[union-attr]
    small(X).sum().backward()
    assert all(p.grad is None for p in net.parameters())
