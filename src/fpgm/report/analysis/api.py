"""`analyze`: statistics of every layer's filters, before anything is pruned.

For every layer it reports the two requirements of norm-based pruning (Section 3.2 of the paper:
norms that differ, and a smallest norm near zero), how redundant its filters are, how far criteria
agree on which filters to remove, and the layer's fraction of the model's cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from fpgm import criteria
from fpgm.planning.budget import Budget, check_fraction
from fpgm.planning.options import PlanOptions
from fpgm.planning.planner import Planner
from fpgm.planning.width_rounding import Rounder
from fpgm.report.analysis.redundancy import GramMatrix
from fpgm.report.analysis.result import Analysis, LayerAnalysis
from fpgm.tracing.grouping import Structure
from fpgm.tracing.layer_calls import called_layers
from fpgm.tracing.residual import Residual
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.example_inputs import to_model_device
from fpgm.utils.modules import named_tensors
from fpgm.utils.parameter_roles import layer_of

COMPARED_CRITERIA = ("fpgm", "l1", "l2")
"""Criteria whose choices of filters are compared."""
DEFAULT_RATE = 0.4
"""Fraction of the filters that each criterion chooses, by default."""
MAX_QUICK_PRODUCTS = 2**33
"""Multiplications that the pairwise comparison of a layer's filters may take in quick mode."""


@cpu_by_default()
def analyze(
    model: nn.Module,
    example_inputs: Any,
    *,
    rate: float = DEFAULT_RATE,
    residual: Residual = "coupled",
    ignore: Sequence[str] = (),
    approximate: bool = False,
) -> Analysis:
    """Analyze the filters of every layer.

    The model runs once, to find its costs and its channel groups, and is not changed.

    Args:
        model: the model to analyze.
        example_inputs: inputs for one forward pass, as for `plan`.
        rate: fraction of the filters that each criterion chooses, to see how far they agree.
        residual: as for `plan`; decides which layers form a group.
        ignore: layers that are not pruned, as for `plan`.
        approximate: as for `plan`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> analysis = analyze(net, torch.zeros(1, 3, 8, 8))
    >>> [(layer.layer, layer.filters, layer.prunable) for layer in analysis.layers]
    [('0', 8, True), ('2', 4, False)]
    """
    planner = Planner(
        model,
        to_model_device(model, example_inputs),
        budget=Budget(rate=rate),
        options=PlanOptions(residual=residual, ignore=ignore, approximate=approximate),
    )
    return analyze_planner(planner, rate)


def analyze_planner(
    planner: Planner, rate: float = DEFAULT_RATE, *, quick: bool = False
) -> Analysis:
    """Analyze a model that a planner has already traced; groups are those of the planner's plans.

    Args:
        planner: holds the model and its channel groups.
        rate: fraction of the filters that each criterion chooses.
        quick: skip the pairwise comparison of filters in very large layers.
    """
    check_fraction("rate", rate)
    model, structure = planner.model, planner.structure
    macs: dict[str, int] = {}
    for call in called_layers(model, planner.examples[0]):
        macs[call.path] = macs.get(call.path, 0) + call.macs
    tensors = named_tensors(model)
    params = sum(p.numel() for p in model.parameters())
    groups_of_producer: dict[int, tuple[int, ...]] = {}
    for number, group in enumerate(structure.groups):
        for producer in group.producers:
            groups_of_producer[id(producer)] = (*groups_of_producer.get(id(producer), ()), number)
    consumed = _consumed_groups(structure)
    order = {path: position for position, path in enumerate(macs)}
    tensors_in = Counter(producer.layer for producer in structure.producers)
    layers = []
    for producer in sorted(structure.producers, key=lambda item: order.get(item.layer, len(order))):
        weight = tensors[producer.info.name].detach()
        rows = producer.filters(weight).cpu()
        if len(rows) > 1:
            layers.append(
                _analyze_layer(
                    producer.layer if tensors_in[producer.layer] == 1 else producer.info.name,
                    rows, rate, quick,
                    write_groups=groups_of_producer.get(id(producer), ()),
                    read_groups=consumed.get(producer.layer, ()),
                    groups=[group.name for group in structure.groups],
                    macs_share=macs.get(producer.layer, 0) / max(1, structure.macs()),
                    params_share=weight.numel() / max(1, params),
                )
            )  # fmt: skip
    return Analysis(rate, tuple(layers), tuple(group.name for group in structure.groups))


def _consumed_groups(structure: Structure) -> dict[str, tuple[int, ...]]:
    """Map every layer to the indices of the groups whose units it consumes."""
    group_of = torch.full((int(structure.classes.max()) + 1,), -1)
    for number, group in enumerate(structure.groups):
        group_of[group.units] = number
    consumed: dict[str, tuple[int, ...]] = {}
    for info in structure.trace.parameter_infos.values():
        for field, role in zip(info.fields, info.roles, strict=True):
            if role == "reads":
                groups = group_of[structure.classes_of(field)].unique().tolist()
                consumed[layer_of(info.name)] = tuple(n for n in groups if n >= 0)
    return consumed


def _analyze_layer(
    layer: str,
    rows: Tensor,
    rate: float,
    quick: bool,
    *,
    write_groups: tuple[int, ...],
    read_groups: tuple[int, ...],
    groups: Sequence[str],
    macs_share: float,
    params_share: float,
) -> LayerAnalysis:
    """Analyze the filters of one layer.

    Args:
        layer: The layer's name.
        rows: Its filters, [n, d].
        rate: Pruning rate at which criteria are compared.
        quick: Do not compare filters with each other in the largest layers.
        write_groups: Indices of the groups that the layer's filters are in.
        read_groups: Indices of the groups that the layer reads.
        groups: Names of all groups.
        macs_share: The layer's fraction of the model's MACs.
        params_share: The layer's fraction of the model's parameters.
    """
    criteria.check_finite(rows, layer)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    mean = float(norms.mean()) or 1.0
    analysis = LayerAnalysis(
        layer=layer,
        writes=tuple(groups[number] for number in write_groups),
        reads=tuple(groups[number] for number in read_groups),
        write_groups=write_groups,
        read_groups=read_groups,
        macs_share=macs_share,
        params_share=params_share,
        norms=_to_floats(norms),
        deviation=float(norms.std(correction=0)) / mean,
        least=float(norms.min()) / mean,
    )
    if quick and len(rows) * rows.numel() > MAX_QUICK_PRODUCTS:
        return analysis
    filters = rows.double()
    scores = {
        name: criteria.score(criteria.resolve(name), filters, rate, layer)
        for name in COMPARED_CRITERIA
    }
    median = criteria.geometric_median(filters, scores["fpgm"])
    centered = filters - median
    gram = GramMatrix(centered)
    return replace(
        analysis,
        to_median=_to_floats(torch.linalg.vector_norm(centered, dim=1)),
        to_nearest=_to_floats(gram.nearest_distances()),
        places=tuple(_to_floats(point) for point in gram.principal_coordinates()),
        effective_rank=gram.effective_rank(around=median),
        overlap=_criteria_overlap(scores, rate),
    )


def _criteria_overlap(scores: Mapping[str, Tensor], rate: float) -> dict[str, float]:
    """Compute, for each pair of criteria, the fraction of filters that both would remove."""
    total = len(next(iter(scores.values())))
    count = total - Rounder(align=1).kept_units(total, rate)
    chosen = {
        name: set(criteria.ranking(values)[:count].tolist()) for name, values in scores.items()
    }
    return {
        f"{a} and {b}": len(chosen[a] & chosen[b]) / max(1, count)
        for a, b in combinations(chosen, 2)
    }


def _to_floats(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values.tolist())
