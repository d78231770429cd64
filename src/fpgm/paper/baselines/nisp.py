"""NISP: importance is given to the last responses and handed back to all that made them.

Yu and others rank the features in front of the classifier by Inf-FS (Roffo and others, 2015: a
feature matters by the weight of all walks through it in a graph whose edges say how much two
features vary and how little they say the same), and hand these scores back through the network: a
unit is worth what its readers are worth, by the sizes of the weights they read it with. Additions
hand scores to both sides, norms and activations hand them on. What a layer adds to a stream is
worth what reads the stream behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fpgm.errors import ModelError
from fpgm.paper.baselines.base import Method, Pruned, Task, classes_of, cut
from fpgm.paper.baselines.hooks import show
from fpgm.planning.planner import Planner
from fpgm.planning.precomputed_scores import Scored
from fpgm.recovery.unfold import matrix_of
from fpgm.tracing.grouping import rows_of
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.modules import named_tensors
from fpgm.utils.parameter_info import WRITES

ALPHA = 0.5
"""Share of the spread in an edge; the rest is how little two features go together."""
WALKS = 0.9
"""Of the largest factor at which the weights of ever longer walks still add up."""


def nisp(task: Task) -> Pruned:
    """The same share of every layer goes, by what was handed back."""
    watched = task.planner(residual="coupled")  # what is added shares its readers
    last = called_layers(task.model, watched.examples[0])[-1].path
    features = responses(task, last)
    return cut(task.planner(Scored("nisp", handed_back(watched, last, inf_fs(features)))))


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
    """What the last layer reads, [inputs, features]: means over positions or tokens."""
    found: list[Tensor] = []
    behind = isinstance(task.model.get_submodule(last), nn.Linear)  # its channels come last

    def keep(x: Tensor, _: object) -> None:
        if x.ndim > 2:
            x = x.flatten(1, -2).mean(1) if behind else x.flatten(2).mean(2)
        found.append(x.detach().cpu())

    show(task, {last: keep})
    return torch.cat(found)


@torch.no_grad()
def handed_back(planner: Planner, last: str, importance: Tensor) -> dict[str, Tensor]:
    """Scores of every layer's filters, from those of what the last layer reads.

    Layers are visited from the last to the first; by then all that read what they give have handed
    it its worth, and what is read in front of them has not.
    """
    sides = _sides(planner)
    worth = torch.zeros(classes_of(planner), dtype=torch.float64)
    if last not in sides or len(sides[last][0]) != len(importance):
        raise ModelError(f"NISP hands back from the last layer, '{last}': its inputs are unknown.")
    worth.index_add_(0, sides[last][0], importance.double())
    beyond = torch.zeros_like(worth)  # of it, what passed the last addition: around the branch
    calls = called_layers(planner.model, planner.examples[0])
    # What gives one number a channel is no branch that is added to maps but a gate on them.
    maps = {call.path for call in calls if call.given > call.layer.writes * call.layer.batch}
    order = dict.fromkeys(call.path for call in calls)
    writers = {w.layer: w for w in planner.structure.writers}
    tensors = named_tensors(planner.model)
    found: dict[str, Tensor] = {}
    for path in reversed(order):
        if path in writers:
            writer = writers[path]
            found[path] = worth[writer.classes].clone()
            if writer.carries:  # depthwise: what is handed back passes through one filter
                found[path] -= beyond[writer.classes]
                sizes = writer.filters(tensors[writer.slot.name].detach()).double().abs().sum(1)
                worth[writer.classes] = beyond[writer.classes] + sizes.cpu() * found[path]
        if path == last or path not in sides:
            continue
        reads, writes = sides[path]
        if path in maps:
            beyond[writes] = worth[writes]
        sizes = matrix_of(planner.model.get_submodule(path)).double().abs().cpu()  # type: ignore[arg-type]
        groups, columns, outs = sizes.shape
        channels = len(reads) // groups
        by_channel = sizes.reshape(groups, channels, columns // channels, outs).sum(2)
        given = torch.einsum("gco,go->gc", by_channel, worth[writes].reshape(groups, outs))
        worth.index_add_(0, reads, given.reshape(-1))
        most = worth.max().clamp(min=1e-30)  # deep networks would overflow
        worth /= most
        beyond /= most
    return {layer: worth[w.classes] for layer, w in writers.items()} | found


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
