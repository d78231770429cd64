"""Code that adds a tensor of fixed size in train mode only is found, however it reads the mode."""

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm
from fpgm.tracing.names_in_code import CodeNames

X = torch.randn(2, 3, 16, 16)
NOISE = torch.zeros(1, 16, 1, 1)


class Plain(nn.Module):
    """Two layers; subclasses change what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a: Any = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 4, 1)
        self.drop = nn.Dropout(0.1)
        self.noisy = False
        self.prepare()

    def prepare(self) -> None:
        pass

    def between(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.between(self.a(x).relu()))
        return out


def add_noise(module: Any, y: Tensor) -> Tensor:
    return y + NOISE if module.training else y


class WrappedForward(Plain):
    def prepare(self) -> None:
        conv, forward = self.a, self.a.forward
        conv.forward = functools.wraps(forward)(lambda x: add_noise(conv, forward(x)))


class NoisyConv(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return add_noise(self, super()._conv_forward(x, weight, bias))


class MethodCalledByTorch(Plain):
    def prepare(self) -> None:
        self.a = NoisyConv(3, 16, 3, padding=1)


class Steps(nn.Module):
    def __iter__(self) -> Iterator[Callable[[Tensor], Tensor]]:
        if self.training:
            yield lambda y: y + NOISE


class OperatorOfModule(Plain):
    def prepare(self) -> None:
        self.steps = Steps()

    def between(self, y: Tensor) -> Tensor:
        for step in self.steps:  # type: ignore[attr-defined]
            y = step(y)
        return y


class TableOfClass(Plain):
    TABLE: ClassVar = {"add": add_noise}

    def between(self, y: Tensor) -> Tensor:
        return self.TABLE["add"](self, y)


class Tables:
    TABLE: ClassVar = {"add": add_noise}


class TableOfOtherClass(Plain):
    def between(self, y: Tensor) -> Tensor:
        return Tables.TABLE["add"](self, y)


class PartialMethod(Plain):
    def _add(self, y: Tensor, factor: int) -> Tensor:
        return add_noise(self, y * factor)

    add = functools.partialmethod(_add, factor=1)

    def between(self, y: Tensor) -> Tensor:
        return self.add(y)


class PartialForward(Plain):
    def _run(self, x: Tensor, factor: int) -> Tensor:
        out: Tensor = self.b(add_noise(self, self.a(x) * factor))
        return out

    forward = functools.partialmethod(_run, factor=1)  # type: ignore[assignment]


@functools.lru_cache(maxsize=1)
def noise_for(training_of: nn.Module, number: int) -> Tensor:
    return NOISE if training_of.training else torch.zeros(1)


class CachedFunction(Plain):
    def between(self, y: Tensor) -> Tensor:
        noise_for.cache_clear()
        return y + noise_for(self, 0)


class ModeOfDropout(Plain):
    def between(self, y: Tensor) -> Tensor:
        return add_noise(self.drop, y)


class HookOfDropout(Plain):
    def prepare(self) -> None:
        self.drop.register_forward_hook(lambda module, args, out: add_noise(module, out))

    def between(self, y: Tensor) -> Tensor:
        out: Tensor = self.drop(y)
        return out


class OwnForwardOfDropout(HookOfDropout):
    def prepare(self) -> None:
        self.drop.forward = functools.partial(add_noise, self.drop)  # type: ignore[method-assign]


class NoisyDropout(nn.Dropout):
    def __call__(self, y: Tensor) -> Tensor:
        return add_noise(self, y)


class SubclassOfDropout(HookOfDropout):
    def prepare(self) -> None:
        self.drop = NoisyDropout()


class AddsIfNoisy(Plain):
    def between(self, y: Tensor) -> Tensor:
        return y + NOISE if self.noisy else y


class TrainOfInstance(AddsIfNoisy):
    def prepare(self) -> None:
        def train(mode: bool = True) -> nn.Module:
            self.noisy = mode
            return nn.Module.train(self, mode)

        self.train = train  # type: ignore[method-assign, assignment]


class WrappedTrain(AddsIfNoisy):
    @functools.wraps(nn.Module.train)
    def train(self, mode: bool = True) -> Any:
        self.noisy = mode
        return super().train(mode)


class OwnEval(AddsIfNoisy):
    def prepare(self) -> None:
        self.noisy = True

    def eval(self) -> Any:
        self.noisy = False
        return super().eval()


class ModeAsProperty(AddsIfNoisy):
    @property
    def training(self) -> bool:  # type: ignore[override]
        return bool(self.__dict__["noisy"])

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["noisy"] = mode


class OwnSetattr(AddsIfNoisy):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("noisy" if name == "training" else name, value)
        if name == "training":
            super().__setattr__(name, value)


class ClassPattern(Plain):
    def between(self, y: Tensor) -> Tensor:
        match self:
            case nn.Module(training=True):
                return y + NOISE
        return y


MODE_OF = operator.attrgetter("training")
LOOK_UP = getattr
WORD = "train"


class AttributeGetter(Plain):
    def between(self, y: Tensor) -> Tensor:
        return y + NOISE if MODE_OF(self) else y


class OtherNameOfGetattr(Plain):
    def between(self, y: Tensor) -> Tensor:
        return y + NOISE if LOOK_UP(self, WORD + "ing") else y


class Holder(Plain):
    """Calls a function that an object holds."""

    held: Any

    def between(self, y: Tensor) -> Tensor:
        out: Tensor = self.held.function(self, y)
        return out


class InNamespace(Holder):
    def prepare(self) -> None:
        self.held = SimpleNamespace(function=add_noise)


@dataclass(slots=True)
class Slotted:
    function: Callable[[Any, Tensor], Tensor]


class InSlot(Holder):
    def prepare(self) -> None:
        self.held = Slotted(add_noise)


class Named(NamedTuple):
    number: int

    def function(self, module: Any, y: Tensor) -> Tensor:
        return add_noise(module, y)


class InTuple(Holder):
    def prepare(self) -> None:
        self.held = Named(1)


class Caller(Plain):
    """Calls a function that it holds."""

    function: Any

    def between(self, y: Tensor) -> Tensor:
        out: Tensor = self.function(self, y)
        return out


class Helper:
    def add(self, module: Any, y: Tensor) -> Tensor:
        return self.really_add(module, y)

    def really_add(self, module: Any, y: Tensor) -> Tensor:
        return add_noise(module, y)


class BoundMethod(Caller):
    def prepare(self) -> None:
        self.function = Helper().add


def apply(function: Any, module: Any, y: Tensor) -> Tensor:
    out: Tensor = function(module, y)
    return out


class ArgumentOfPartial(Caller):
    def prepare(self) -> None:
        self.function = functools.partial(apply, add_noise)


class InReadOnlyTable(Plain):
    def prepare(self) -> None:
        self.table = MappingProxyType({"add": add_noise})

    def between(self, y: Tensor) -> Tensor:
        return self.table["add"](self, y)


class Describes:
    def __get__(self, module: Any, kind: Any = None) -> Any:
        return functools.partial(add_noise, module)


class Descriptor(Plain):
    add = Describes()

    def between(self, y: Tensor) -> Tensor:
        out: Tensor = self.add(y)
        return out


@functools.singledispatch
def dispatched(module: Any, y: Tensor) -> Tensor:
    return y


dispatched.register(nn.Module, add_noise)


class Dispatch(Plain):
    def between(self, y: Tensor) -> Tensor:
        return dispatched(self, y)


KINDS = [
    WrappedForward, MethodCalledByTorch, TableOfClass, TableOfOtherClass, PartialMethod,
    PartialForward, CachedFunction, ModeOfDropout, HookOfDropout, OwnForwardOfDropout,
    SubclassOfDropout, TrainOfInstance, WrappedTrain, OwnEval, ModeAsProperty, OwnSetattr,
    ClassPattern, AttributeGetter, OtherNameOfGetattr, InNamespace, InSlot, InTuple, BoundMethod,
    ArgumentOfPartial, InReadOnlyTable, Descriptor, Dispatch, OperatorOfModule,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_that_only_training_uses_is_found(kind: type[Plain]) -> None:
    with pytest.raises(fpgm.ModelError, match="nothing to prune"):
        fpgm.plan(kind(), X, rate=0.5, align=1)


class Drops(Plain):
    def between(self, y: Tensor) -> Tensor:
        out: Tensor = self.drop(F.dropout(y, training=self.training))
        return out


def test_dropout_in_train_mode_needs_no_second_trace() -> None:
    net = Drops()
    assert not CodeNames(net).may_depend_on_mode
    assert fpgm.plan(net, X, rate=0.5, align=1).cuts
    assert "forward" not in vars(net.drop)


def test_a_dropout_that_the_user_has_replaced_may_do_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x + NOISE if training else x

    monkeypatch.setattr(F, "dropout", dropout)
    with pytest.raises(fpgm.ModelError, match="nothing to prune"):
        fpgm.plan(Drops(), X, rate=0.5, align=1)


def test_a_forward_of_torch_that_the_user_has_replaced_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = nn.Conv2d.forward
    monkeypatch.setattr(
        nn.Conv2d, "forward", functools.wraps(forward)(lambda m, x: add_noise(m, forward(m, x)))
    )
    assert CodeNames(nn.Sequential(nn.Conv2d(3, 16, 1))).may_depend_on_mode


def test_a_hook_of_all_modules_is_read() -> None:
    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        return add_noise(module, out) if isinstance(module, NoisyDropout) else out

    with nn.modules.module.register_module_forward_hook(hook):
        assert CodeNames(Plain()).may_depend_on_mode
    assert not CodeNames(Plain()).may_depend_on_mode


@pytest.mark.parametrize("line", ["from .math import add", "from . import math"])
def test_a_module_imported_in_forward_is_found_by_its_package(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home: Any = ModuleType("pkg.math")
    exec("def add(module, y):\n    return y * module.training", vars(home))
    package: Any = ModuleType("pkg")
    package.math = home
    monkeypatch.setitem(sys.modules, "pkg", package)
    monkeypatch.setitem(sys.modules, "pkg.math", home)
    names: dict[str, Any] = {"__package__": "pkg", "__name__": "pkg.net"}
    call = "math.add" if line.endswith("math") else "add"
    exec(f"def forward(self, y):\n    {line}\n    return {call}(self, y)", names)
    kind = type("Net", (nn.Module,), {"forward": names["forward"], "__module__": "pkg.net"})
    code = CodeNames(kind())
    assert code.complete
    assert code.may_depend_on_mode


def test_no_code_runs_while_code_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy: Any = ModuleType("lazy")

    def fail(name: str) -> Any:
        raise RuntimeError(f"{name} was imported")

    lazy.__getattr__ = fail
    monkeypatch.setitem(sys.modules, "lazy", lazy)

    class ImportsLazily(Plain):
        def between(self, y: Tensor) -> Tensor:
            from lazy import missing  # type: ignore[import-not-found]

            return y + missing

    assert CodeNames(ImportsLazily()).may_depend_on_mode
