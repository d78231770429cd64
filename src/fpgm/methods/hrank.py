"""HRank: channels go whose feature maps have the lowest rank on average.

Lin and others find that a map's rank hardly depends on the picture, and take its mean over a few
hundred of them as the information a filter gives. The maps looked at are what the layers behind
read, so activations and norms are in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fpgm.examples import batch_of, resized
from fpgm.methods.task import Method, Pruned, Task, classes_of, cut_by
from fpgm.planning import Planner
from fpgm.recovery.rows import read
from fpgm.tracer import undisturbed

MOST_IMAGES = 64
"""Ranks vary little between pictures, and each is a decomposition."""


def hrank(task: Task) -> Pruned:
    """The same share of every layer goes, by rank."""
    planner = task.planner(residual="coupled")  # a stream's channel is read as one
    return cut_by(task, "hrank", planner, ranks(task, planner))


@torch.no_grad()
def ranks(task: Task, planner: Planner) -> Tensor:
    """For every class of units the mean rank of its maps, over pictures and all who read it."""
    total = torch.zeros(classes_of(planner), dtype=torch.float64)
    times = torch.zeros_like(total)
    structure = planner.structure

    def hook_of(channels: Tensor) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            x = read(args, kwargs)
            if x.ndim != 4 or x.shape[1] != len(channels):
                return
            found = torch.linalg.matrix_rank(x.float()).double()  # [pictures, channels]
            total.index_add_(0, channels, found.sum(0).cpu())
            times.index_add_(0, channels, torch.full_like(channels, len(x), dtype=torch.float64))

        return hook

    handles = []
    every = torch.arange(classes_of(planner))
    for layer, classes in structure.readers(every):
        module = planner.model.get_submodule(layer)
        handles.append(module.register_forward_pre_hook(hook_of(classes), with_kwargs=True))
    inputs = task.inputs()
    left = MOST_IMAGES
    try:
        with undisturbed(planner.model):
            planner.model.eval()
            for number in range(len(inputs)):
                if left > 0:
                    example = inputs[number]
                    count = min(left, batch_of(example) or left)
                    resized(example, count).call(planner.model)
                    left -= count
    finally:
        inputs.close()
        for handle in handles:
            handle.remove()
    return total / times.clamp(min=1)


METHOD = Method(
    "hrank",
    "HRank",
    "Lin, Ji, Wang, Zhang, Zhang, Tian, Shao: HRank: Filter Pruning using High-Rank Feature Map "
    "(CVPR 2020), arXiv:2002.10179",
    "Channels whose feature maps have the lowest mean rank go.",
    "inputs",
    hrank,
)
