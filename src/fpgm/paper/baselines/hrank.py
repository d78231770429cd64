"""HRank: remove the channels whose feature maps have the lowest mean rank.

Lin et al. observe that the rank of a feature map hardly depends on the image, and use its mean over
a few hundred images as the importance of a filter. The maps are taken at the input of the next
layer, so they include activations, batch norms and residual additions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpgm.paper.baselines.base import Method, MethodResult, Task, num_unit_classes, prune_and_verify
from fpgm.paper.baselines.hooks import LayerHook, run_inputs
from fpgm.planning.planner import Planner
from fpgm.planning.precomputed_scores import PrecomputedScores

MAX_IMAGES = 64
"""Images to average over: ranks vary little between images, and each needs an SVD."""


def hrank(task: Task) -> MethodResult:
    """Remove the same fraction of every layer by rank; freeze layers without feature maps."""
    # Only coupled groups know the consumers of a residual stream.
    mean_ranks = mean_map_ranks(task, task.planner(residual="coupled"))
    without_maps = {layer for layer, ranks in mean_ranks.items() if bool(ranks.isnan().any())}
    planner = task.planner(
        PrecomputedScores("hrank", {path: ranks.nan_to_num() for path, ranks in mean_ranks.items()})
    )
    for group in list(planner.structure.groups):
        if without_maps & set(group.layers):
            planner.structure.freeze(group.units, "it has no feature maps to compute a rank of")
    return prune_and_verify(planner)


def mean_map_ranks(task: Task, planner: Planner) -> dict[str, Tensor]:
    """Compute the mean rank of the feature maps of every layer's filters; NaN without maps.

    A filter's map is taken at the input of the first layer that consumes it. If no layer consumes
    a map (after global pooling, for example), it is the layer's own output.
    """
    reads = dict(planner.structure.consumers(torch.arange(num_unit_classes(planner))))
    writes = {w.layer: w.classes for w in planner.structure.producers}
    maps = {path: (_MeanRanks(), _MeanRanks()) for path in (*reads, *writes)}
    call_order: dict[str, None] = {}  # of the layers

    def make_hook(path: str) -> LayerHook:
        def hook(x: Tensor, out: object) -> None:
            call_order[path] = None
            for mean, maps_of_call in zip(maps[path], (x, out), strict=True):
                mean.add(maps_of_call)

        return hook

    run_inputs(task, {path: make_hook(path) for path in maps}, MAX_IMAGES)
    consumed_ranks = torch.full((num_unit_classes(planner),), torch.nan, dtype=torch.float64)
    mean_ranks = {path: consumed_ranks[classes] for path, classes in writes.items()}
    for path in reversed(call_order):
        read, produced = maps[path]
        if path in writes:
            from_consumer = consumed_ranks[writes[path]]
            mean_ranks[path] = torch.where(
                from_consumer.isnan(), produced.mean(len(from_consumer)), from_consumer
            )
        if path in reads:
            mean = read.mean(len(reads[path]))
            has_rank = ~mean.isnan()
            consumed_ranks[reads[path][has_rank]] = mean[has_rank]
    return mean_ranks


class _MeanRanks:
    """Running mean of the ranks of a layer's feature maps, by channel."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._count = 0

    def add(self, maps: object) -> None:
        """Add a batch of maps [images, channels, height, width]; ignore other shapes."""
        if isinstance(maps, Tensor) and maps.ndim == 4 and min(maps.shape[2:]) > 1:
            ranks = torch.linalg.matrix_rank(maps.float()).double().sum(0).cpu()
            self._total = ranks if self._total is None else self._total + ranks
            self._count += len(maps)

    def mean(self, channels: int) -> Tensor:
        """Return the mean rank by channel; NaN if there were no maps with that many channels."""
        if self._total is None or len(self._total) != channels:
            return torch.full((channels,), torch.nan, dtype=torch.float64)
        return self._total / self._count


METHOD = Method(
    "hrank",
    "HRank",
    "Lin, Ji, Wang, Zhang, Zhang, Tian, Shao: HRank: Filter Pruning using High-Rank Feature Map "
    "(CVPR 2020), arXiv:2002.10179",
    "Removes the channels whose feature maps have the lowest mean rank.",
    "inputs",
    hrank,
)
