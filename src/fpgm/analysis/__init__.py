"""`analyze`: what the weights of a model say about pruning it, before anything is pruned.

For every layer the paper's two requirements for pruning by norms (its Section 3.2: norms that
differ, and a smallest one near zero), how redundant its filters are, how far criteria agree on
which would go, and what share of the cost the layer has.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from fpgm import criteria
from fpgm.analysis.redundancy import effective_rank, nearest, on_a_plane
from fpgm.analysis.result import Analysis, LayerAnalysis
from fpgm.budget import Budget, Rounder, check_share
from fpgm.coupling import Structure, Writer
from fpgm.examples import as_examples, beside
from fpgm.latency.layers import called_layers
from fpgm.planning import Planner
from fpgm.tensors import named_tensors

COMPARED = ("fpgm", "l1", "l2")
"""Criteria whose choices are laid over each other."""


def analyze(model: nn.Module, example_inputs: Any, *, rate: float = 0.4) -> Analysis:
    """Look at every layer's filters; `rate` is the share that criteria are asked to choose.

    The model is run once, for its costs and for which filters may go, and stays as it is.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> found = analyze(net, torch.zeros(1, 3, 8, 8))
    >>> [(own.layer, own.filters, own.prunable) for own in found.layers]
    [('0', 8, True), ('2', 4, False)]
    """
    check_share("rate", rate)
    planner = Planner(model, beside(model, example_inputs), budget=Budget(rate=rate))
    structure = planner.structure
    macs: dict[str, int] = {}
    for call in called_layers(model, as_examples(example_inputs)[0]):
        macs[call.path] = macs.get(call.path, 0) + call.macs
    tensors = named_tensors(model)
    params = sum(p.numel() for p in model.parameters())
    writes: dict[int, tuple[str, ...]] = {}
    for pool in structure.pools:
        for writer in pool.writers:
            writes[id(writer)] = (*writes.get(id(writer), ()), pool.name)
    reads = _read(structure)
    order = {path: place for place, path in enumerate(macs)}
    layers = []
    for writer in structure.writers:
        weight = tensors[writer.slot.name].detach()
        rows = writer.filters(weight).double().cpu()
        if len(rows) > 1 and not writer.carries:
            layers.append(
                _layer(
                    writer, rows, rate,
                    writes=writes.get(id(writer), ()),
                    reads=reads.get(writer.layer, ()),
                    macs_share=macs.get(writer.layer, 0) / max(1, structure.macs()),
                    params_share=weight.numel() / max(1, params),
                )
            )  # fmt: skip
    layers.sort(key=lambda own: order.get(own.layer, len(order)))
    return Analysis(rate, tuple(layers))


def _read(structure: Structure) -> dict[str, tuple[str, ...]]:
    """For every layer, the groups whose units it reads."""
    found: dict[str, tuple[str, ...]] = {}
    for slot in structure.seen.slots.values():
        for field, role in zip(slot.fields, slot.roles, strict=True):
            if role == "reads":
                units = structure.of(field)
                groups = [p.name for p in structure.pools if bool(torch.isin(p.units, units).any())]
                found[slot.name.rpartition(".")[0]] = tuple(groups)
    return found


def _layer(
    writer: Writer,
    rows: Tensor,
    rate: float,
    *,
    writes: tuple[str, ...],
    reads: tuple[str, ...],
    macs_share: float,
    params_share: float,
) -> LayerAnalysis:
    norms = torch.linalg.vector_norm(rows, dim=1)
    mean = float(norms.mean()) or 1.0
    around = rows - criteria.geometric_median(rows)
    return LayerAnalysis(
        layer=writer.layer,
        writes=writes,
        reads=reads,
        macs_share=macs_share,
        params_share=params_share,
        norms=_numbers(norms),
        to_median=_numbers(torch.linalg.vector_norm(around, dim=1)),
        to_nearest=_numbers(nearest(rows)),
        places=tuple(_numbers(place) for place in on_a_plane(around)),
        effective_rank=effective_rank(rows),
        deviation=float(norms.std(correction=0)) / mean,
        least=float(norms.min()) / mean,
        overlap=_overlap(writer.layer, rows, rate),
    )


def _overlap(layer: str, rows: Tensor, rate: float) -> dict[str, float]:
    """How far criteria agree on which filters would go."""
    count = len(rows) - Rounder(align=1).kept(len(rows), rate)
    gone = {}
    for name in COMPARED:
        scores = criteria.score(criteria.resolve(name), rows, rate, layer)
        gone[name] = set(criteria.ranking(scores)[:count].tolist())
    return {
        f"{a} and {b}": len(gone[a] & gone[b]) / max(1, count) for a, b in combinations(gone, 2)
    }


def _numbers(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values.tolist())
