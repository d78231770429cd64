"""Examples are used many times, and are the user's own: they must stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fpgm


@dataclass
class Graph:
    nodes: Tensor
    layers: int = 0


class WritesIntoItsInput(nn.Module):
    """Keeps its state in its input, as code for graphs often does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, graph: Graph) -> Tensor:
        graph.nodes.mul_(0.5)
        graph.nodes = self.first(graph.nodes).relu()
        graph.layers += 1
        out: Tensor = self.last(graph.nodes)
        return out


def test_an_object_of_the_users_own_class_stays_as_it_is() -> None:
    nodes = torch.ones(3, 4)
    graph = Graph(nodes)
    small = fpgm.prune(WritesIntoItsInput(), (graph,), rate=0.5, align=1)
    assert small.first.out_features == 4  # type: ignore[union-attr]
    assert graph.nodes is nodes
    assert torch.equal(nodes, torch.ones(3, 4))
    assert graph.layers == 0


def test_an_input_that_requires_gradients_gets_none() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4, requires_grad=True)
    computed = x * 2
    fpgm.prune(net, computed, rate=0.5, align=1)
    fpgm.prune(net, x, rate=0.5, align=1)
    assert x.grad is None
    computed.sum().backward()  # its graph is still there
