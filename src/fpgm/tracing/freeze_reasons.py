"""Why channels are frozen: reasons by class, from the constraints that a trace reports.

Rules report freeze constraints (`trace_values.FreezeConstraint`). Here they become one reason for
each class, together with what only the model as a whole shows. The planner adds what was ignored on
request and what made a compact model wrong (`Structure.freeze`). `plan.frozen` lists all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fpgm.tracing.producers import Producer, sliceable
from fpgm.tracing.recorder import TraceRecorder
from fpgm.utils.modules import modules_by_path, overlapping_tensors
from fpgm.utils.parameter_roles import layer_of


def add_reason(reasons: dict[int, str], classes: Tensor, reason: str) -> None:
    """Record why classes are frozen; the first reason is kept."""
    for c in classes.unique().tolist():
        reasons.setdefault(c, reason)


def collect_reasons(
    trace: TraceRecorder, classes: Tensor, approximate: bool
) -> tuple[dict[int, str], frozenset[int]]:
    """Return why classes are frozen, and those that may be removed approximately.

    Args:
        trace: what the rules reported.
        classes: of every label.
        approximate: whether norms may run over fewer channels.
    """
    reasons: dict[int, str] = {}
    soft: set[int] = set()

    def note(labels: Tensor, reason: str) -> None:
        add_reason(reasons, classes[labels], reason)

    for constraint in trace.freeze_constraints:
        if constraint.soft and approximate:
            soft.update(classes[constraint.labels].tolist())
        else:
            note(constraint.labels, constraint.reason)
    for tensor, other in overlapping_tensors(trace.model):
        for f in trace.parameter_infos[id(tensor)].fields:
            note(f, f"their weights share memory with '{other}'")
    scripted = [
        f"{path}."
        for path, module in modules_by_path(trace.model).items()
        if isinstance(module, torch.jit.ScriptModule)
    ]
    for info in trace.parameter_infos.values():
        for f in info.fields:
            if info.name.startswith(tuple(scripted)):
                note(f, "a scripted module cannot be resized")
            if not sliceable(f):
                note(f, f"'{info.name}' does not hold them along one axis")
    return reasons, frozenset(soft)


def freeze_unbalanced(reasons: dict[int, str], balances: Sequence[Tensor]) -> None:
    """Freeze blocks whose partners cannot shrink."""
    changed = True
    while changed:
        changed = False
        for blocks in balances:
            free = [[c for c in row if c not in reasons] for row in blocks.tolist()]
            if all(free) or not any(free):
                continue
            for row in free:
                for c in row:
                    reasons[c] = "they must match channels that are frozen"
            changed = True


def frozen_rows(
    producers: Sequence[Producer], reasons: Mapping[int, str]
) -> list[tuple[tuple[str, ...], int, str]]:
    """List layers, channels and reason of all frozen filters, for display."""
    highest = max((int(p.classes.max()) for p in producers if len(p.classes)), default=0)
    stays = np.zeros(max(highest, *reasons, 0) + 1, dtype=np.bool_)
    stays[list(reasons)] = True
    rows: dict[str, tuple[list[str], int]] = {}
    for producer in producers:
        classes = producer.classes.numpy()
        counts = Counter(reasons[c] for c in classes[stays[classes]].tolist())
        for reason, count in counts.items():
            layers, total = rows.get(reason, ([], 0))
            rows[reason] = ([*layers, producer.layer], total + count)
    return [(tuple(dict.fromkeys(layers)), n, reason) for reason, (layers, n) in rows.items()]


def unreached_rows(names: Sequence[str]) -> list[tuple[tuple[str, ...], int, str]]:
    """List parameters that no forward pass has used, for display."""
    layers = tuple(dict.fromkeys(layer_of(name) for name in names))
    return [(layers, 0, "no forward pass with the example inputs uses them")] if layers else []
