"""Values that the model's own code takes out of torch: what they are made of stays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.helpers.movement import check
from torch import Tensor, nn

import fpgm

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """The feature map is scaled by what plain Python makes of the first layer's channel means."""

    def __init__(self, scale: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.scale = scale
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        out: Tensor = self.c(self.b(x * self.scale(x.detach().mean((0, 2, 3)))).tanh())
        return out


LEAVING: dict[str, Callable[[Tensor], float]] = {
    "numpy": lambda v: float(np.abs(v.numpy()).max()),
    "asarray": lambda v: float(np.abs(np.asarray(v)).max()),
    "a function of numpy's": lambda v: float(np.linalg.norm(v)),
    "tolist": lambda v: max(map(abs, v.tolist())),
    "item": lambda v: max(abs(one.item()) for one in v),
    "float": lambda v: max(abs(float(one)) for one in v),
    "int": lambda v: 1.0 + max(int(1000 * one) for one in v),
    "bool": lambda v: 1.0 + sum(bool(one > 0) for one in v),
    "dlpack": lambda v: float(np.abs(np.from_dlpack(v)).max()),
    "storage": lambda v: max(map(abs, v.storage().tolist())),
    "untyped storage": lambda v: 1.0 + sum(bytes(v.untyped_storage())[:8]),
    "deepcopy": lambda v: float(copy.deepcopy(v).abs().max()),
    "equal": lambda v: 1.0 + torch.equal(v, v.abs()),
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("name", LEAVING)
def test_channels_whose_values_leave_torch_stay(name: str) -> None:
    net = Scaled(LEAVING[name])
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert [group.name for group in plan.groups] == ["b"]
    assert check(net, 0.5, X) == "right"


def test_the_reason_names_the_method_and_the_line() -> None:
    plan = fpgm.plan(Scaled(LEAVING["tolist"]), X, rate=0.5, align=1)
    reason = next(f.reason for f in plan.frozen if "a" in f.layers)
    assert reason.startswith("their values leave torch by 'tolist' in the model (test_values_")


def test_sizes_read_by_python_leave_nothing() -> None:
    net = Scaled(lambda v: float(v.ndim + len(v.shape) + v.stride(0)))
    assert [g.name for g in fpgm.plan(net, X, rate=0.5, align=1).groups] == ["a", "b"]


def test_values_that_come_back_are_of_fixed_size() -> None:
    class Back(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            back = torch.from_numpy(x.detach().numpy().copy())
            out: Tensor = self.c(self.b(x + back).tanh())
            return out

    assert [g.name for g in fpgm.plan(Back(float), X, rate=0.5, align=1).groups] == ["b"]
