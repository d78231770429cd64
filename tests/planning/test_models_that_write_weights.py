"""Forward passes that write into weights: looking at such a model leaves no trace."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm

X = torch.randn(2, 3, 8, 8)


class Writing(nn.Module):
    def __init__(self, write: Callable[["Writing"], None]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 12, 3)
        self.head = nn.Conv2d(12, 4, 1)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.no_grad():
            self.write(self)
        out: Tensor = self.head(self.body(x).relu())
        return out


def assign(net: Writing) -> None:
    net.body.weight.data = net.body.weight.data * 0.9


def rebind(net: Writing) -> None:
    net.body.weight = nn.Parameter(net.body.weight * 0.9)


def average(net: Writing) -> None:
    net.body.bias.data.lerp_(torch.ones_like(net.body.bias), 0.1)


VARIANTS: dict[str, Callable[[Writing], object]] = {
    "data": lambda net: net.body.weight.data.mul_(0.9),
    "in place": lambda net: net.body.weight.clamp_(-0.05, 0.05),
    "copy": lambda net: net.body.weight.copy_(F.normalize(net.body.weight, dim=2)),
    "slice": lambda net: net.body.weight[:, :, 1].fill_(0.0),
    "out": lambda net: torch.mul(net.body.weight, 0.9, out=net.body.weight),
    "assign": assign,
    "rebind": rebind,
    "average": average,
}


@pytest.mark.parametrize("way", VARIANTS)
def test_looking_at_a_model_leaves_no_trace(way: str) -> None:
    torch.manual_seed(0)
    net = Writing(VARIANTS[way]).eval()  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    small = fpgm.prune(net, X, rate=0.5, align=1)
    assert (small.stem[0].out_channels, small.body.out_channels) == (4, 6)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    keep = small.fpgm_plans[-1].cuts[0]
    assert torch.equal(
        small.get_parameter(keep.tensor),
        before[keep.tensor].index_select(keep.dim, torch.tensor(keep.keep)),
    )


def test_parameters_that_share_memory_stay() -> None:
    """A copy could not be tied to a slice of the other."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    net[2].weight = nn.Parameter(net[1].weight.data)
    with pytest.raises(fpgm.ModelError, match=r"their weights share memory with '[12]\.weight'"):
        fpgm.plan(net, torch.randn(3, 4), rate=0.5, align=1)
    both = torch.randn(16, 8)  # of which each has its own part
    net[1].weight, net[2].weight = nn.Parameter(both[:8]), nn.Parameter(both[8:])
    assert len(fpgm.plan(net, torch.randn(3, 4), rate=0.5, align=1).groups) == 3


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_in_one_line(layout: torch.layout) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.nested.nested_tensor([x[0, :2], x[1, :4]], layout=layout)
            out: Tensor = self.last(torch.nested.to_padded_tensor(self.first(rows).relu(), 0.0))
            return out

    with pytest.raises(fpgm.ModelError, match=r"uses nested tensors in .*pad them instead"):
        fpgm.plan(Nested(), torch.randn(2, 5, 3), rate=0.5, align=1)
