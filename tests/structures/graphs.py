"""Graph convolutions, dense and sparse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import floats, named, network, together

FAMILY = "graphs"
NODES = 7


def edges() -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 2], [1, 2, 3, 4, 5, 6, 0, 3, 5]])


def adjacency() -> Tensor:
    a = torch.eye(NODES)
    a[edges()[0], edges()[1]] = 1
    return a / a.sum(1, keepdim=True)


FEATURES = (floats(2, NODES, 5), floats(3, NODES, 5))


@network(FAMILY, *FEATURES)
class GraphByMatmul(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency())
        self.a, self.b, self.head = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = (self.adjacency @ layer(x)).relu()
        return self.head(x)


@network(FAMILY, together(floats(NODES, 5), edges))
class GraphByScatter(nn.Module):
    """Messages are added up with index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            y = layer(x)
            x = y.index_add(0, edge[1], y[edge[0]]).relu()
        return self.head(x)


@network(FAMILY, together(floats(NODES, 5), edges))
class GraphByScatterAdd(nn.Module):
    """The same with scatter_add and an expanded index."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            y = layer(x)
            index = edge[1][:, None].expand(-1, y.shape[1])
            x = torch.zeros_like(y).scatter_add(0, index, y[edge[0]]).relu()
        return self.head(x)


@network(FAMILY, named(features=floats(NODES, 5), edge=edges))
class GraphAttention(nn.Module):
    """Attention over a node's neighbors, by a softmax over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(5, 8), nn.Linear(16, 1)
        self.mix, self.head = nn.Linear(8, 10), nn.Linear(10, 3)

    def forward(self, *, features: Tensor, edge: Tensor) -> Tensor:
        v = self.value(features)
        pairs = torch.cat([v[edge[0]], v[edge[1]]], 1)
        weights = F.leaky_relu(self.score(pairs), 0.2).exp()
        total = weights.new_zeros(v.shape[0], 1).index_add(0, edge[1], weights)
        messages = v[edge[0]] * weights / total[edge[1]]
        return self.head(self.mix(torch.zeros_like(v).index_add(0, edge[1], messages)).relu())


@network(FAMILY, floats(2, 3, 6, NODES), floats(1, 3, 9, NODES))
class SpatialTemporalGraph(nn.Module):
    """ST-GCN: one layer makes K partitions' channels, an einsum with K adjacencies sums them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.stack([adjacency(), torch.eye(NODES)]))
        self.space = nn.Conv2d(3, 2 * 8, 1)
        self.time = nn.Conv2d(8, 8, (3, 1), 1, (1, 0))
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.space(x)
        n, c, t, v = y.shape
        y = torch.einsum("nkctv,kvw->nctw", y.view(n, 2, c // 2, t, v), self.adjacency)
        return self.head(self.time(self.norm(y).relu()).mean((2, 3)))


@network(FAMILY, floats(2, 3, 6, NODES))
class SpatialTemporalGraphPerPartition(nn.Module):
    """The same with one layer a partition."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.stack([adjacency(), torch.eye(NODES)]))
        self.space = nn.ModuleList(nn.Conv2d(3, 8, 1) for _ in range(2))
        self.time = nn.Conv2d(8, 8, (3, 1), 1, (1, 0))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = sum(f(x) @ a for f, a in zip(self.space, self.adjacency, strict=True))
        return self.head(self.time(y.relu()).mean((2, 3)))


@network(FAMILY, floats(2, 3, 6, NODES))
class LearntAdjacency(nn.Module):
    """2s-AGCN: the adjacency is computed from embedded features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", adjacency())
        self.free = nn.Parameter(torch.zeros(NODES, NODES) + 0.01)
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.value, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        n, _, _, v = x.shape
        left = self.left(x).permute(0, 3, 1, 2).reshape(n, v, -1)
        right = self.right(x).reshape(n, -1, v)
        a = (left @ right).softmax(-2) + self.fixed + self.free
        return self.head((self.value(x).flatten(1, 2) @ a).view(n, -1, x.shape[2], v).mean((2, 3)))


@network(FAMILY, floats(2, 4, 9, 3), floats(1, 4, 12, 3))
class GroupedGraphEinsum(nn.Module):
    """Weights for each of several groups: 'bgnc,gco->bgno'."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 3, 8) * 0.4)
        self.second = nn.Parameter(torch.randn(4, 8, 6) * 0.4)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bgnc,gco->bgno", x, self.first).relu()
        x = torch.einsum("bgnc,gco->bgno", x, self.second).relu()
        return self.head(x.mean(2))


@network(FAMILY, floats(2, 3, 20), floats(3, 3, 25))
class PointNet(nn.Module):
    """Shared layers on points, a maximum over them, joined to each point again."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.wide = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 12, 1)
        self.mix, self.head = nn.Conv1d(20, 8, 1), nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = self.local(x).relu()
        g = self.wide(f).amax(2, keepdim=True).expand(-1, -1, f.shape[2])
        return self.head(self.mix(torch.cat([f, g], 1)).relu())


@network(FAMILY, floats(2, 3, 20), floats(3, 3, 25))
class EdgeConvolution(nn.Module):
    """DGCNN: neighbors are found among features, edges are pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 8, 1), nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 4)

    def edges(self, x: Tensor, near: Tensor) -> Tensor:
        n, c, p = x.shape
        index = near.flatten(1)[:, None].expand(-1, c, -1)
        others = x.gather(2, index).view(n, c, p, -1)
        item = x[..., None].expand_as(others)
        return torch.cat([item, others - item], 1)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x.mT, x.mT).topk(4, -1, largest=False).indices
        x = self.first(self.edges(x, near)).relu().amax(-1)
        return self.head(self.second(self.edges(x, near)).relu().amax((2, 3)))


@network(FAMILY, floats(2, NODES, 5))
class SparseAdjacency(nn.Module):
    """The adjacency is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("dense", adjacency())
        self.a, self.b, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        sparse = self.dense.to_sparse()
        parts = [torch.sparse.mm(sparse, self.a(one)).relu() for one in x]
        return self.head(self.b(torch.stack(parts)).relu())


@network(FAMILY, floats(NODES, 5))
class SparseBuffer(nn.Module):
    """The adjacency is kept as a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency().to_sparse())
        self.a, self.b, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sparse.mm(self.adjacency, self.a(x)).relu()
        return self.head((self.adjacency @ self.b(x)).relu())
