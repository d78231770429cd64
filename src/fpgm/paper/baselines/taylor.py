"""Taylor: remove the units with the smallest first-order estimate of the change of the loss.

Molchanov et al. sum weight times gradient over a unit and square the sum: the first-order Taylor
estimate of how much the loss changes without it. All units of the network are ranked together.
Gradients are those of the cross-entropy in eval mode, batch by batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fpgm.paper.baselines.base import Method, MethodResult, Task, class_logits, num_unit_classes
from fpgm.paper.baselines.global_threshold import prune_globally
from fpgm.planning.planner import Planner
from fpgm.utils.modules import named_tensors


def taylor(task: Task) -> MethodResult:
    """Prune globally by the Taylor scores."""
    planner = task.planner()
    return prune_globally(planner, "taylor", taylor_scores(task, planner))


def taylor_scores(task: Task, planner: Planner) -> Tensor:
    """Compute (Σ weight · gradient)² for every class of units, averaged over batches."""
    net = task.trainable_copy().eval()
    producers = [w for w in planner.structure.producers if not w.carries]
    tensors = named_tensors(net)
    weights = [tensors[producer.info.name] for producer in producers]
    total = torch.zeros(num_unit_classes(planner), dtype=torch.float64)
    count = 0
    with torch.enable_grad():
        for x, classes in task.labelled_batches():
            loss = F.cross_entropy(class_logits(net, x), classes)
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            change = torch.zeros_like(total)
            for producer, weight, gradient in zip(producers, weights, gradients, strict=True):
                if gradient is not None:
                    per_filter = (
                        producer.filters((weight * gradient).detach()).double().sum(1).cpu()
                    )
                    change.index_add_(0, producer.classes, per_filter)
            total += change.square()
            count += 1
    return total / max(1, count)


METHOD = Method(
    "taylor",
    "Taylor",
    "Molchanov, Mallya, Tyree, Frosio, Kautz: Importance Estimation for Neural Network Pruning "
    "(CVPR 2019), arXiv:1906.10771",
    "Removes the units with the smallest (Σ weight · gradient)² of the whole network.",
    "labels",
    taylor,
)
