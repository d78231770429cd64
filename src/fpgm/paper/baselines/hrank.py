"""HRank: channels go whose feature maps have the lowest rank on average.

Lin and others find that a map's rank hardly depends on the picture, and take its mean over a few
hundred of them as the information a filter gives. The maps looked at are what the next layer reads,
so activations, norms and what is added to a filter's own are in them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpgm.paper.baselines.base import Method, Pruned, Task, classes_of, cut
from fpgm.paper.baselines.hooks import Watcher, show
from fpgm.planning.planner import Planner
from fpgm.planning.precomputed_scores import Scored

MOST_IMAGES = 64
"""Ranks vary little between pictures, and each is a decomposition."""


def hrank(task: Task) -> Pruned:
    """The same share of every layer goes, by rank; layers that give no maps stay whole."""
    found = ranks(task, task.planner(residual="coupled"))  # who reads a stream is known there
    flat = {layer for layer, own in found.items() if bool(own.isnan().any())}
    planner = task.planner(Scored("hrank", {path: own.nan_to_num() for path, own in found.items()}))
    for pool in list(planner.structure.pools):
        if flat & set(pool.layers):
            planner.structure.freeze(pool.units, "it gives no maps that have a rank")
    return cut(planner)


def ranks(task: Task, planner: Planner) -> dict[str, Tensor]:
    """For every layer the mean rank of its filters' maps; NaN where they have none.

    Maps are what the first layer behind it reads; where nobody reads a map (behind a pooling to one
    position, say), what the layer itself gives out.
    """
    reads = dict(planner.structure.readers(torch.arange(classes_of(planner))))
    writes = {w.layer: w.classes for w in planner.structure.writers}
    maps = {path: (_Ranks(), _Ranks()) for path in (*reads, *writes)}
    order: dict[str, None] = {}  # in which layers were called

    def watcher(path: str) -> Watcher:
        def watch(x: Tensor, out: object) -> None:
            order[path] = None
            for own, seen in zip(maps[path], (x, out), strict=True):
                own.add(seen)

        return watch

    show(task, {path: watcher(path) for path in maps}, MOST_IMAGES)
    behind = torch.full((classes_of(planner),), torch.nan, dtype=torch.float64)
    found = {path: behind[classes] for path, classes in writes.items()}
    for path in reversed(order):
        read, given = maps[path]
        if path in writes:
            known = behind[writes[path]]
            found[path] = torch.where(known.isnan(), given.mean(len(known)), known)
        if path in reads:
            mean = read.mean(len(reads[path]))
            mine = ~mean.isnan()
            behind[reads[path][mine]] = mean[mine]
    return found


class _Ranks:
    """Ranks of a layer's maps, channel by channel."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._times = 0

    def add(self, maps: object) -> None:
        """Count maps in, [pictures, channels, height, width], if that is what they are."""
        if isinstance(maps, Tensor) and maps.ndim == 4 and min(maps.shape[2:]) > 1:
            found = torch.linalg.matrix_rank(maps.float()).double().sum(0).cpu()
            self._total = found if self._total is None else self._total + found
            self._times += len(maps)

    def mean(self, channels: int) -> Tensor:
        """Of what was counted; NaN if that was nothing, or of another number of channels."""
        if self._total is None or len(self._total) != channels:
            return torch.full((channels,), torch.nan, dtype=torch.float64)
        return self._total / self._times


METHOD = Method(
    "hrank",
    "HRank",
    "Lin, Ji, Wang, Zhang, Zhang, Tian, Shao: HRank: Filter Pruning using High-Rank Feature Map "
    "(CVPR 2020), arXiv:2002.10179",
    "Channels whose feature maps have the lowest mean rank go.",
    "inputs",
    hrank,
)
