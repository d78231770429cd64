"""NISP: propagate the importance of the last features back through the network.

Yu et al. rank the input features of the classifier by Inf-FS (Roffo et al., 2015: the weight of all
walks through a feature in a graph, whose edges are large for features that vary much and correlate
little). They propagate these scores backwards: the importance of a unit is the sum of its
consumers' importances, weighted by the absolute weights. Additions pass importance to both
operands; batch norms and activations pass it on. A branch that is added to a residual stream has
the importance of the stream's later consumers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fpgm.errors import ModelError
from fpgm.paper.baselines.base import Method, MethodResult, Task, num_unit_classes, prune_and_verify
from fpgm.paper.baselines.hooks import run_inputs
from fpgm.planning.planner import Planner
from fpgm.planning.precomputed_scores import PrecomputedScores
from fpgm.recovery.unfold import matrix_of
from fpgm.tracing.layer_calls import called_layers
from fpgm.tracing.producers import rows_of
from fpgm.utils.modules import named_tensors
from fpgm.utils.parameter_roles import PRODUCER_ROLES

ALPHA = 0.5
"""Weight of the standard deviation in an edge; the rest is the weight of low correlation."""
WALK_FACTOR = 0.9
"""Damping of longer walks, as a fraction of the largest factor for which the sum converges."""


def nisp(task: Task) -> MethodResult:
    """Remove the same fraction of every layer by propagated importance."""
    planner = task.planner(residual="coupled")  # added tensors have the same consumers
    last = called_layers(task.model, planner.examples[0])[-1].path
    features = last_layer_inputs(task, last)
    return prune_and_verify(
        task.planner(
            PrecomputedScores("nisp", propagate_importance(planner, last, inf_fs(features)))
        )
    )


def inf_fs(features: Tensor) -> Tensor:
    """Score features [inputs, features] by Inf-FS; high scores are important.

    A feature that varies is more important than a constant one:

    >>> inf_fs(torch.tensor([[0., 1., 5.], [1., -1., 5.], [0., 2., 5.], [1., 0., 5.]])).argmin()
    tensor(2)
    """
    values = features.double()
    spread = values.std(0)
    spread = spread / spread.max().clamp(min=1e-30)
    edges = ALPHA * torch.maximum(spread[:, None], spread) + (1 - ALPHA) * (1 - _spearman(values))
    radius = torch.linalg.eigvalsh(edges).abs().max().clamp(min=1e-30)
    eye = torch.eye(len(edges), dtype=torch.float64)
    walks: Tensor = torch.linalg.inv(eye - WALK_FACTOR / radius * edges) - eye
    return walks.sum(1)


def _spearman(features: Tensor) -> Tensor:
    """Compute absolute rank correlations; those of constant features are 1."""
    ranks = torch.stack([_ranks(column) for column in features.T], 1)
    constant = features.amax(0) == features.amin(0)
    ranks = ranks - ranks.mean(0)
    ranks = ranks / torch.linalg.vector_norm(ranks, dim=0).clamp(min=1e-30)
    correlations: Tensor = (ranks.T @ ranks).abs().clamp(max=1)
    correlations[constant] = 1
    correlations[:, constant] = 1
    return correlations


def _ranks(values: Tensor) -> Tensor:
    """Compute ranks; equal values get their mean rank.

    >>> _ranks(torch.tensor([0., 5., 0., 2.]))
    tensor([0.5000, 3.0000, 0.5000, 2.0000], dtype=torch.float64)
    """
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double() - 1
    mean: Tensor = last - (counts.double() - 1) / 2
    return mean[which]


def last_layer_inputs(task: Task, last: str) -> Tensor:
    """Record the inputs of the last layer as [inputs, features], averaged over positions."""
    inputs: list[Tensor] = []
    channels_last = isinstance(task.model.get_submodule(last), nn.Linear)  # of a linear layer

    def record(x: Tensor, _: object) -> None:
        if x.ndim > 2:
            x = x.flatten(1, -2).mean(1) if channels_last else x.flatten(2).mean(2)
        inputs.append(x.detach().cpu())

    run_inputs(task, {last: record})
    return torch.cat(inputs)


@torch.no_grad()
def propagate_importance(planner: Planner, last: str, importance: Tensor) -> dict[str, Tensor]:
    """Propagate the importance of the last layer's inputs to the filters of every layer.

    Layers are visited from the last to the first, so that all consumers of a layer's output have
    passed on their importance before the layer itself is visited.
    """
    classes = _channel_classes(planner)
    importances = torch.zeros(num_unit_classes(planner), dtype=torch.float64)
    if last not in classes or len(classes[last][0]) != len(importance):
        raise ModelError(
            f"NISP starts at the inputs of the last layer, '{last}', but they could not be traced: "
            "use another method."
        )
    importances.index_add_(0, classes[last][0], importance.double())
    skipped = torch.zeros_like(importances)  # the part that bypasses the current residual branch
    calls = called_layers(planner.model, planner.examples[0])
    # A layer with one number per channel (a gate) is not a branch that is added to feature maps.
    maps = {call.path for call in calls if call.given > call.layer.writes * call.layer.batch}
    order = dict.fromkeys(call.path for call in calls)
    producers = {w.layer: w for w in planner.structure.producers}
    tensors = named_tensors(planner.model)
    scores: dict[str, Tensor] = {}
    for path in reversed(order):
        if path in producers:
            producer = producers[path]
            scores[path] = importances[producer.classes].clone()
            if producer.carries:  # depthwise: importance passes through one filter
                scores[path] -= skipped[producer.classes]
                sizes = producer.filters(tensors[producer.info.name].detach()).double().abs().sum(1)
                importances[producer.classes] = (
                    skipped[producer.classes] + sizes.cpu() * scores[path]
                )
        if path == last or path not in classes:
            continue
        reads, writes = classes[path]
        if path in maps:
            skipped[writes] = importances[writes]
        sizes = matrix_of(planner.model.get_submodule(path)).double().abs().cpu()  # type: ignore[arg-type]
        groups, columns, outs = sizes.shape
        channels = len(reads) // groups
        by_channel = sizes.reshape(groups, channels, columns // channels, outs).sum(2)
        received = torch.einsum("gco,go->gc", by_channel, importances[writes].reshape(groups, outs))
        importances.index_add_(0, reads, received.reshape(-1))
        largest = importances.max().clamp(min=1e-30)  # avoids overflow in deep networks
        importances /= largest
        skipped /= largest
    return {layer: importances[w.classes] for layer, w in producers.items()} | scores


def _channel_classes(planner: Planner) -> dict[str, tuple[Tensor, Tensor]]:
    """Map each layer to the unit classes of its input channels and of its output channels."""
    classes: dict[str, dict[str, Tensor]] = {}
    structure = planner.structure
    for info in structure.trace.parameter_infos.values():
        layer, _, kind = info.name.rpartition(".")
        for labels, role in zip(info.fields, info.roles, strict=True):
            if kind == "weight" and (role == "reads" or role in PRODUCER_ROLES):
                side = "reads" if role == "reads" else "writes"
                classes.setdefault(layer, {})[side] = structure.classes_of(rows_of(labels))
    return {
        layer: (sides["reads"], sides["writes"])
        for layer, sides in classes.items()
        if len(sides) == 2
    }


METHOD = Method(
    "nisp",
    "NISP",
    "Yu, Li, Chen, Lai, Morariu, Han, Gao, Lin, Davis: NISP: Pruning Networks using Neuron "
    "Importance Score Propagation (CVPR 2018), arXiv:1711.05908",
    "Propagates the importance of the last features (Inf-FS) back through absolute weights.",
    "inputs",
    nisp,
)
