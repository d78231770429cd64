"""`analyze`: what the weights of a model say about pruning it, before anything is pruned.

For every layer the paper's two requirements for pruning by norms (its Section 3.2: norms that
differ, and a smallest one near zero), how redundant its filters are, how far criteria agree on
which would go, and what share of the cost the layer has.
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
from fpgm.planning.budget import Budget, Rounder, check_share
from fpgm.planning.planner import Planner
from fpgm.report.analysis.redundancy import Gram
from fpgm.report.analysis.result import Analysis, LayerAnalysis
from fpgm.tracing.grouping import Structure
from fpgm.tracing.layer_calls import called_layers
from fpgm.tracing.residual import Residual
from fpgm.utils.example_inputs import beside
from fpgm.utils.modules import named_tensors
from fpgm.utils.parameter_info import layer_of

COMPARED = ("fpgm", "l1", "l2")
"""Criteria whose choices are laid over each other."""
RATE = 0.4
"""Share of the filters that criteria are asked to choose, by default."""
QUICK = 2**33
"""Products of numbers that comparing a layer's filters with each other may take, if in a hurry."""


def analyze(
    model: nn.Module,
    example_inputs: Any,
    *,
    rate: float = RATE,
    residual: Residual = "coupled",
    ignore: Sequence[str] = (),
    approximate: bool = False,
) -> Analysis:
    """Look at every layer's filters; `rate` is the share that criteria are asked to choose.

    The model is run once, for its costs and for which filters may go, and stays as it is. The
    other options are those of `plan`: they decide which layers are one group.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> found = analyze(net, torch.zeros(1, 3, 8, 8))
    >>> [(own.layer, own.filters, own.prunable) for own in found.layers]
    [('0', 8, True), ('2', 4, False)]
    """
    planner = Planner(
        model,
        beside(model, example_inputs),
        budget=Budget(rate=rate),
        residual=residual,
        ignore=ignore,
        approximate=approximate,
    )
    return analysis_of(planner, rate)


def analysis_of(planner: Planner, rate: float = RATE, *, quick: bool = False) -> Analysis:
    """The same for a model that was watched already: its groups are those of the planner's plans.

    If `quick`, filters of the largest layers are not compared with each other.
    """
    check_share("rate", rate)
    model, structure = planner.model, planner.structure
    macs: dict[str, int] = {}
    for call in called_layers(model, planner.examples[0]):
        macs[call.path] = macs.get(call.path, 0) + call.macs
    tensors = named_tensors(model)
    params = sum(p.numel() for p in model.parameters())
    writes: dict[int, tuple[int, ...]] = {}
    for number, pool in enumerate(structure.pools):
        for writer in pool.writers:
            writes[id(writer)] = (*writes.get(id(writer), ()), number)
    reads = _read(structure)
    order = {path: place for place, path in enumerate(macs)}
    tensors_in = Counter(writer.layer for writer in structure.writers)
    layers = []
    for writer in sorted(structure.writers, key=lambda own: order.get(own.layer, len(order))):
        weight = tensors[writer.slot.name].detach()
        rows = writer.filters(weight).cpu()
        if len(rows) > 1:
            layers.append(
                _layer(
                    writer.layer if tensors_in[writer.layer] == 1 else writer.slot.name,
                    rows, rate, quick,
                    write_groups=writes.get(id(writer), ()),
                    read_groups=reads.get(writer.layer, ()),
                    groups=[pool.name for pool in structure.pools],
                    macs_share=macs.get(writer.layer, 0) / max(1, structure.macs()),
                    params_share=weight.numel() / max(1, params),
                )
            )  # fmt: skip
    return Analysis(rate, tuple(layers), tuple(pool.name for pool in structure.pools))


def _read(structure: Structure) -> dict[str, tuple[int, ...]]:
    """For every layer, the numbers of the groups whose units it reads."""
    group_of = torch.full((int(structure.classes.max()) + 1,), -1)
    for number, pool in enumerate(structure.pools):
        group_of[pool.units] = number
    found: dict[str, tuple[int, ...]] = {}
    for slot in structure.seen.slots.values():
        for field, role in zip(slot.fields, slot.roles, strict=True):
            if role == "reads":
                groups = group_of[structure.of(field)].unique().tolist()
                found[layer_of(slot.name)] = tuple(n for n in groups if n >= 0)
    return found


def _layer(
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
    criteria.check_finite(rows, layer)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    mean = float(norms.mean()) or 1.0
    found = LayerAnalysis(
        layer=layer,
        writes=tuple(groups[number] for number in write_groups),
        reads=tuple(groups[number] for number in read_groups),
        write_groups=write_groups,
        read_groups=read_groups,
        macs_share=macs_share,
        params_share=params_share,
        norms=_numbers(norms),
        deviation=float(norms.std(correction=0)) / mean,
        least=float(norms.min()) / mean,
    )
    if quick and len(rows) * rows.numel() > QUICK:
        return found
    wide = rows.double()
    scores = {name: criteria.score(criteria.resolve(name), wide, rate, layer) for name in COMPARED}
    median = criteria.geometric_median(wide, scores["fpgm"])
    around = wide - median
    gram = Gram(around)
    return replace(
        found,
        to_median=_numbers(torch.linalg.vector_norm(around, dim=1)),
        to_nearest=_numbers(gram.nearest()),
        places=tuple(_numbers(place) for place in gram.on_a_plane()),
        effective_rank=gram.effective_rank(around=median),
        overlap=_overlap(scores, rate),
    )


def _overlap(scores: Mapping[str, Tensor], rate: float) -> dict[str, float]:
    """How far criteria agree on which filters would go."""
    total = len(next(iter(scores.values())))
    count = total - Rounder(align=1).kept(total, rate)
    gone = {name: set(criteria.ranking(own)[:count].tolist()) for name, own in scores.items()}
    return {
        f"{a} and {b}": len(gone[a] & gone[b]) / max(1, count) for a, b in combinations(gone, 2)
    }


def _numbers(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values.tolist())
