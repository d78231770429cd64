"""NISP: importance is given to the last responses and handed back to all that made them.

Yu and others rank the features in front of the classifier by Inf-FS (Roffo and others, 2015: a
feature matters by the weight of all walks through it in a graph whose edges say how much two
features vary and how little they say the same), and hand these scores back through the network: a
unit is worth what its readers are worth, by the sizes of the weights they read it with. Additions
hand scores to both sides, norms and activations hand them on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpgm.coupling import rows_of
from fpgm.errors import ModelError
from fpgm.latency.layers import called_layers
from fpgm.methods.looking import show
from fpgm.methods.task import Method, Pruned, Task, classes_of, cut_by
from fpgm.plan import WRITES
from fpgm.planner import Planner
from fpgm.recovery.rows import matrix_of
from fpgm.tensors import named_tensors

ALPHA = 0.5
"""Share of the spread in an edge; the rest is how little two features go together."""
WALKS = 0.9
"""Of the largest factor at which the weights of ever longer walks still add up."""


def nisp(task: Task) -> Pruned:
    """The same share of every layer goes, by what was handed back."""
    planner = task.planner(residual="coupled")  # what is added shares its scores
    last = called_layers(task.model, planner.examples[0])[-1].path
    features = responses(task, last)
    return cut_by(task, "nisp", planner, handed_back(planner, last, inf_fs(features)))


def inf_fs(features: Tensor) -> Tensor:
    """Scores of features [inputs, features], high is important.

    A feature that varies matters more than one that is constant:

    >>> inf_fs(torch.tensor([[0., 1., 5.], [1., -1., 5.], [0., 2., 5.], [1., 0., 5.]])).argmin()
    tensor(2)
    """
    wide = features.double()
    spread = wide.std(0)
    spread = spread / spread.max().clamp(min=1e-30)
    edges = ALPHA * torch.maximum(spread[:, None], spread) + (1 - ALPHA) * (1 - _spearman(wide))
    radius = torch.linalg.eigvalsh(edges).abs().max().clamp(min=1e-30)
    eye = torch.eye(len(edges), dtype=torch.float64)
    walks: Tensor = torch.linalg.inv(eye - WALKS / radius * edges) - eye
    return walks.sum(1)


def _spearman(features: Tensor) -> Tensor:
    """Sizes of rank correlations; of constants they are 1, since they say nothing new."""
    ranks = torch.stack([_ranks(column) for column in features.T], 1)
    constant = features.amax(0) == features.amin(0)
    ranks = ranks - ranks.mean(0)
    ranks = ranks / torch.linalg.vector_norm(ranks, dim=0).clamp(min=1e-30)
    found: Tensor = (ranks.T @ ranks).abs().clamp(max=1)
    found[constant] = 1
    found[:, constant] = 1
    return found


def _ranks(values: Tensor) -> Tensor:
    """Places in order; equal values share the mean of theirs.

    >>> _ranks(torch.tensor([0., 5., 0., 2.]))
    tensor([0.5000, 3.0000, 0.5000, 2.0000], dtype=torch.float64)
    """
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double() - 1
    mean: Tensor = last - (counts.double() - 1) / 2
    return mean[which]


def responses(task: Task, last: str) -> Tensor:
    """What the last layer reads, [inputs, features]."""
    found: list[Tensor] = []

    def keep(x: Tensor, _: object) -> None:
        found.append((x.flatten(2).mean(2) if x.ndim > 2 else x).detach().cpu())

    show(task, {last: keep})
    return torch.cat(found)


@torch.no_grad()
def handed_back(planner: Planner, last: str, importance: Tensor) -> Tensor:
    """Scores of all classes, from those of what the last layer reads."""
    sides = _sides(planner)
    worth = torch.zeros(classes_of(planner), dtype=torch.float64)
    if last not in sides or len(sides[last][0]) != len(importance):
        raise ModelError(f"NISP hands back from the last layer, '{last}': its inputs are unknown.")
    worth.index_add_(0, sides[last][0], importance.double())
    order = dict.fromkeys(call.path for call in called_layers(planner.model, planner.examples[0]))
    single = {w.layer: w for w in planner.structure.writers if w.carries}
    tensors = named_tensors(planner.model)
    for path in reversed(order):
        if path in single:  # depthwise: what is handed back passes through one filter
            writer = single[path]
            weight = tensors[writer.slot.name].detach()
            worth[writer.classes] *= writer.filters(weight).double().abs().sum(1).cpu()
        if path == last or path not in sides:
            continue
        reads, writes = sides[path]
        sizes = matrix_of(planner.model.get_submodule(path)).double().abs().cpu()  # type: ignore[arg-type]
        groups, columns, outs = sizes.shape
        channels = len(reads) // groups
        by_channel = sizes.reshape(groups, channels, columns // channels, outs).sum(2)
        given = torch.einsum("gco,go->gc", by_channel, worth[writes].reshape(groups, outs))
        worth.index_add_(0, reads, given.reshape(-1))
        worth /= worth.max().clamp(min=1e-30)  # deep networks would overflow
    return worth


def _sides(planner: Planner) -> dict[str, tuple[Tensor, Tensor]]:
    """For every layer with both, the classes of the channels it reads and of those it writes."""
    found: dict[str, dict[str, Tensor]] = {}
    structure = planner.structure
    for slot in structure.seen.slots.values():
        layer, _, kind = slot.name.rpartition(".")
        for labels, role in zip(slot.fields, slot.roles, strict=True):
            if kind == "weight" and (role == "reads" or role in WRITES):
                side = "reads" if role == "reads" else "writes"
                found.setdefault(layer, {})[side] = structure.of(rows_of(labels))
    return {layer: (own["reads"], own["writes"]) for layer, own in found.items() if len(own) == 2}


METHOD = Method(
    "nisp",
    "NISP",
    "Yu, Li, Chen, Lai, Morariu, Han, Gao, Lin, Davis: NISP: Pruning Networks using Neuron "
    "Importance Score Propagation (CVPR 2018), arXiv:1711.05908",
    "Importance of the last responses (Inf-FS) handed back through the sizes of the weights.",
    "inputs",
    nisp,
)
