"""Taylor: units go whose loss, by the first term of its expansion, is the least.

Molchanov and others square the product of weights and their gradients, summed over a unit, as the
first-order estimate of how much the loss changes if it goes, and rank all units of a network
together. Gradients are of the cross-entropy in eval mode, batch by batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fpgm.paper.baselines.base import Method, Pruned, Task, class_scores, classes_of
from fpgm.paper.baselines.global_threshold import cut_everywhere
from fpgm.planning.planner import Planner
from fpgm.utils.modules import named_tensors


def taylor(task: Task) -> Pruned:
    """All units in one ranking."""
    planner = task.planner()
    return cut_everywhere(planner, "taylor", losses(task, planner))


def losses(task: Task, planner: Planner) -> Tensor:
    """For every class of units: (Σ weight · gradient)², the mean over batches."""
    net = task.copy().eval()
    writers = [w for w in planner.structure.writers if not w.carries]
    tensors = named_tensors(net)
    weights = [tensors[writer.slot.name] for writer in writers]
    total = torch.zeros(classes_of(planner), dtype=torch.float64)
    count = 0
    with torch.enable_grad():
        for x, classes in task.labelled():
            loss = F.cross_entropy(class_scores(net, x), classes)
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            change = torch.zeros_like(total)
            for writer, weight, gradient in zip(writers, weights, gradients, strict=True):
                if gradient is not None:
                    each = writer.filters((weight * gradient).detach()).double().sum(1).cpu()
                    change.index_add_(0, writer.classes, each)
            total += change.square()
            count += 1
    return total / max(1, count)


METHOD = Method(
    "taylor",
    "Taylor",
    "Molchanov, Mallya, Tyree, Frosio, Kautz: Importance Estimation for Neural Network Pruning "
    "(CVPR 2019), arXiv:1906.10771",
    "Units go by the squared sum of weight times gradient, all layers in one ranking.",
    "labels",
    taylor,
)
