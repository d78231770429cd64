"""HRank: channels go whose feature maps have the lowest rank on average.

Lin and others find that a map's rank hardly depends on the picture, and take its mean over a few
hundred of them as the information a filter gives. The maps looked at are what the layers behind
read, so activations and norms are in them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpgm.methods.looking import Watcher, show
from fpgm.methods.task import Method, Pruned, Task, classes_of, cut
from fpgm.planner import Planner
from fpgm.scored import Scored

MOST_IMAGES = 64
"""Ranks vary little between pictures, and each is a decomposition."""


def hrank(task: Task) -> Pruned:
    """The same share of every layer goes, by rank; layers that give no maps stay whole."""
    watched = task.planner(residual="coupled")  # a stream's channel is read as one
    found, known = ranks(task, watched)
    planner = task.planner(Scored.of_units("hrank", watched.structure, found))
    flat = {w.layer for w in watched.structure.writers if not bool(known[w.classes].all())}
    for pool in list(planner.structure.pools):
        if flat & set(pool.layers):
            planner.structure.freeze(pool.units, "it gives no maps that have a rank")
    return cut(planner)


def ranks(task: Task, planner: Planner) -> tuple[Tensor, Tensor]:
    """For every class of units the mean rank of its maps, and whether it has any.

    Maps are what layers read, over all who read it; where nobody reads a map (behind a pooling to
    one position, say), what the layer itself gives out.
    """
    read, given = (_Mean(classes_of(planner)) for _ in range(2))
    watchers: dict[str, Watcher] = {}
    outputs = {w.layer: w.classes for w in planner.structure.writers}
    inputs = dict(planner.structure.readers(torch.arange(classes_of(planner))))
    for path in {*outputs, *inputs}:
        watchers[path] = _watcher(read, inputs.get(path), given, outputs.get(path))
    show(task, watchers, MOST_IMAGES)
    found = torch.where(read.times > 0, read.mean(), given.mean())
    return found, (read.times > 0) | (given.times > 0)


class _Mean:
    """Mean ranks, class by class."""

    def __init__(self, count: int) -> None:
        self.total = torch.zeros(count, dtype=torch.float64)
        self.times = torch.zeros(count, dtype=torch.float64)

    def add(self, classes: Tensor | None, maps: object) -> None:
        """Count maps in, [pictures, channels, height, width], if they are some of these classes."""
        if classes is None or not isinstance(maps, Tensor) or maps.ndim != 4:
            return
        if maps.shape[1] == len(classes) and min(maps.shape[2:]) > 1:
            found = torch.linalg.matrix_rank(maps.float()).double().sum(0).cpu()
            self.total.index_add_(0, classes, found)
            self.times.index_add_(0, classes, torch.full_like(found, len(maps)))

    def mean(self) -> Tensor:
        """Of what was counted."""
        return self.total / self.times.clamp(min=1)


def _watcher(read: _Mean, reads: Tensor | None, given: _Mean, writes: Tensor | None) -> Watcher:
    def watch(x: Tensor, out: object) -> None:
        read.add(reads, x)
        given.add(writes, out)

    return watch


METHOD = Method(
    "hrank",
    "HRank",
    "Lin, Ji, Wang, Zhang, Zhang, Tian, Shao: HRank: Filter Pruning using High-Rank Feature Map "
    "(CVPR 2020), arXiv:2002.10179",
    "Channels whose feature maps have the lowest mean rank go.",
    "inputs",
    hrank,
)
