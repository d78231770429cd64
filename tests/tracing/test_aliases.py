"""Tensors that no operator made: other Python objects with the numbers of a known tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpgm

X = torch.randn(2, 3, 8, 8)


class Sub(torch.Tensor):
    pass


def _set_data(y: Tensor) -> Tensor:
    out = torch.empty(0)
    out.data = y
    return out


VARIANTS: dict[str, Any] = {
    "as_subclass": lambda y: y.as_subclass(Sub),
    "_make_subclass": lambda y: torch.Tensor._make_subclass(Sub, y),
    "Parameter": nn.Parameter,
    "data": _set_data,
    "dlpack": lambda y: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y)),
}


class Net(nn.Module):
    def __init__(self, way: str, at_end: bool) -> None:
        super().__init__()
        self.way, self.at_end = way, at_end
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        wrap = VARIANTS[self.way]
        y: Tensor = self.b(self.a(x).relu() if self.at_end else wrap(self.a(x)).relu())
        return wrap(y) if self.at_end else y  # type: ignore[no-any-return]


@pytest.mark.parametrize("at_end", [True, False], ids=["output", "middle"])
@pytest.mark.parametrize("way", VARIANTS)
def test_labels_follow_to_another_object_with_the_same_numbers(way: str, at_end: bool) -> None:
    net = Net(way, at_end)
    small = fpgm.compact(net, fpgm.plan(net, X, rate=0.5, align=1))
    assert small.b.out_channels == 10
    assert small.a.out_channels == 8
    assert small(X).shape == net(X).shape
