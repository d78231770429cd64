"""Which attributes forward code may read, by whatever way it reaches them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm
from fpgm.tracing.names_in_code import CodeNames

X = torch.randn(2, 3, 16, 16)


class Plain(nn.Module):
    """A number of channels that is also a scale, read in ways that differ by subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.dim1 = 16
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 4, 1)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu())
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


class ByComputedName(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) * getattr(self, f"dim{1}") ** -0.5


class Scaler:
    @staticmethod
    def scale(model: Any, y: Tensor) -> Tensor:
        return y * model.dim1**-0.5


class ByStaticMethod(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return Scaler.scale(self, self.features(x))


class ScaleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, model: Any) -> Tensor:
        return y * model.dim1**-0.5


class ByAutogradFunction(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = ScaleFunction.apply(self.features(x), self)
        return out


class Helper:
    def __init__(self, model: Any) -> None:
        self.model = model

    def go(self, y: Tensor) -> Tensor:
        out: Tensor = y * self.model.dim1**-0.5
        return out


class ByHelper(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return Helper(self).go(self.features(x))


TABLE: dict[str, Callable[[Any, Tensor], Tensor]] = {"go": lambda m, y: y * m.dim1**-0.5}


class ByTable(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return TABLE["go"](self, self.features(x))


class Multiplies:
    def __mul__(self, pair: Any) -> Tensor:
        model, y = pair
        out: Tensor = y * model.dim1**-0.5
        return out


MULTIPLIER = Multiplies()


class ByOperator(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return MULTIPLIER * (self, self.features(x))


class ByNestedObject(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.parts: Any = [{"inner": functools.partial(Helper.go, Helper(None))}]
        self.parts[0]["inner"].args[0].model = self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts[0]["inner"](self.features(x))
        return out


READS = [ByComputedName, ByStaticMethod, ByAutogradFunction, ByHelper, ByTable, ByOperator]


@pytest.mark.parametrize("kind", [*READS, ByNestedObject])
def test_an_attribute_that_is_read_in_a_roundabout_way_keeps_outputs_right(
    kind: type[Plain],
) -> None:
    torch.manual_seed(0)
    net = kind()
    assert CodeNames(net).may_read("dim1")
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert plan.cuts
    assert fpgm.verify(net, plan, X).ok


def test_an_attribute_that_no_code_names_follows_without_a_check() -> None:
    assert not CodeNames(Plain()).may_read("dim1")
    plan = fpgm.plan(Plain(), X, rate=0.5, align=1)
    assert any(a.name == "dim1" and a.after == 8 for a in plan.attributes)


class NoisyInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(NOISE["add"](self, self.a(x).relu()))
        return out


NOISE: dict[str, Any] = {
    "add": lambda model, f: f + torch.zeros(1, 16, 1, 1) if model.training else f
}


def test_a_size_that_only_training_uses_is_detected_behind_a_table_of_functions() -> None:
    net = NoisyInTraining()
    with pytest.raises(fpgm.ModelError, match="nothing to prune"):
        fpgm.plan(net, X, rate=0.5, align=1)


class Drops(Plain):
    """Passes the mode to torch's dropout, which the comparison of the two modes leaves out."""

    rate = 0.1

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        if self.rate > 0:
            y = F.dropout(y, p=float(self.rate), training=self.training)
        return y


class DropsLess(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.features(x), p=self.training * 0.1, training=True)


class DropsAndScales(Drops):
    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.features(x), training=self.training)
        return y * 2 if self.training else y


class DropsByNegation(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.features(x), training=not self.training)


class DropsInALambda(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.features(x), training=(lambda: self.training)())


def scale(y: Tensor, training: bool) -> Tensor:
    return y * 2 if training else y


class DropsWhatDependsOnMode(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(scale(self.features(x), training=self.training), p=0.1)


class DropsByName(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.features(x), training=getattr(self, "training"))  # noqa: B009


class Own:
    @staticmethod
    def dropout(y: Tensor, training: bool) -> Tensor:
        return scale(y, training)


class DropsInItsOwnWay(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return Own.dropout(self.features(x), training=self.training)


@pytest.mark.parametrize(
    "kind",
    [DropsLess, DropsAndScales, DropsByNegation, DropsInALambda, DropsWhatDependsOnMode,
     DropsByName, DropsInItsOwnWay],
)  # fmt: skip
def test_code_may_depend_on_the_mode(kind: type[Plain]) -> None:
    assert CodeNames(kind()).may_depend_on_mode


@pytest.mark.parametrize("kind", [Plain, Drops])
def test_the_mode_only_decides_about_dropout(kind: type[Plain]) -> None:
    assert not CodeNames(kind()).may_depend_on_mode
