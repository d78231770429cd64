"""The network diagram and the layer table of a report, as data.

Every layer becomes a row with its pruned filters and the reason why it was frozen. Groups whose
channels several layers produce (residual streams) become vertical lines next to the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fpgm.pruning.plan import Group, Plan
from fpgm.report.records import LayerRecord, Number
from fpgm.report.run import Run
from fpgm.utils.parameter_roles import layer_of

MAX_COLUMNS = 12
"""Columns for streams next to the diagram."""
_MAX_LENGTH = 300
"""Characters shown of a name."""


@dataclass(frozen=True)
class LayerRow:
    """One layer of the report."""

    name: str
    filters: int | None
    """None if unknown; such a layer is not pruned."""
    kept: int | None
    removed: tuple[int, ...]
    """Indices of the removed filters, if the analysis has data of single filters."""
    groups: tuple[str, ...]
    """The groups of its units, each with the number of other layers in it."""
    reason: str
    """Why some or all of its filters are frozen; empty if none are."""
    analysis: LayerRecord | None = None
    """The layer's entry in `analysis.json`."""
    error: tuple[Number, Number] | None = None
    """Output error before and after recovery."""


@dataclass(frozen=True)
class Stream:
    """A group whose units several layers produce: its rows, and the column it is drawn in."""

    name: str
    first: int
    last: int
    producers: tuple[int, ...]
    """Rows of the layers that produce its channels."""
    consumers: tuple[int, ...]
    """Rows of the layers that consume them."""
    column: int = -1
    """-1 if there is no free column."""


def layer_rows(run: Run) -> list[LayerRow]:
    """List all layers: first the analyzed ones in execution order, then others the plan names."""
    plan = run.plan
    if plan is None:
        return []
    analyses = {
        analysis.layer: analysis for analysis in (run.analysis.layers if run.analysis else ())
    }
    cuts = plan.filters()
    groups = _groups_by_layer(plan)
    reasons: dict[str, list[str]] = {}
    for frozen in plan.frozen:
        for name in frozen.layers:
            reasons.setdefault(name, []).append(frozen.reason)
    solved = {
        layer.layer: (layer.before, layer.after)
        for layer in (run.results.recovery.layers if run.results.recovery else ())
    }
    tensors = {cut.tensor for cut in plan.cuts} | set(analyses)
    covered = {*analyses, *(name if name in groups else layer_of(name) for name in analyses)}
    others = dict.fromkeys([*groups, *reasons, *(n for n in cuts if n not in tensors)])
    rows = []
    for name in [*analyses, *(other for other in others if other not in covered)]:
        analysis, cut = analyses.get(name), cuts.get(name)
        if analysis is not None and cut is not None and len(analysis.norms) != cut.total:
            analysis = replace(
                analysis, norms=(), to_median=(), places=()
            )  # of a different network
        filters = (
            cut.total if cut is not None else len(analysis.norms) if analysis is not None else None
        )
        path = name if name in groups or name in reasons else layer_of(name)
        rows.append(
            LayerRow(
                name,
                filters,
                filters if cut is None else cut.kept,
                # Only as many as there are norms: a plan may claim any number of filters.
                tuple(cut.removed())
                if cut is not None and analysis is not None and analysis.norms
                else (),
                tuple(_describe_group(n, plan.groups[n]) for n in groups.get(path, ())),
                "; ".join(dict.fromkeys(reasons.get(path, ()))),
                analysis,
                solved.get(name),
            )
        )
    return rows


def _groups_by_layer(plan: Plan) -> dict[str, list[int]]:
    """Map each layer to the indices of the groups that its units belong to."""
    groups: dict[str, list[int]] = {}
    for number, group in enumerate(plan.groups):
        for name in dict.fromkeys(group.layers):
            groups.setdefault(name, []).append(number)
    return groups


def group_label(number: int, group: Group) -> str:
    """Name a group by number and name, as several groups may have the same name."""
    return f"{number + 1}. {truncate_middle(group.name)}"


def _describe_group(number: int, group: Group) -> str:
    others = len(set(group.layers)) - 1
    if not others:  # then the group has the layer's name
        return f"{number + 1}, this layer only"
    return f"{group_label(number, group)}, with {others} other layer{'s' * (others > 1)}"


def truncate_middle(text: str, max_length: int = _MAX_LENGTH) -> str:
    """Replace the middle of a long text by an ellipsis.

    >>> truncate_middle("features.denseblock4.denselayer16.conv2", 20)
    'features.d…er16.conv2'
    """
    half = max_length // 2
    return text if len(text) <= max_length else f"{text[:half]}…{text[-half:]}"


def layout_streams(run: Run, rows: Sequence[LayerRow]) -> list[Stream]:
    """Place the groups of several layers from top to bottom, each in the first free column."""
    plan, row_of = run.plan, {row.name: number for number, row in enumerate(rows)}
    if plan is None:
        return []
    consumers_of: dict[int, list[int]] = {}
    same = run.analysis is not None and run.analysis.groups == tuple(g.name for g in plan.groups)
    for number, row in enumerate(rows):
        for index in row.analysis.read_groups if row.analysis is not None and same else ():
            consumers_of.setdefault(index, []).append(number)
    unplaced = []
    for number, group in enumerate(plan.groups):
        producers = sorted({row_of[name] for name in group.layers if name in row_of})
        if len(producers) > 1:
            rows_used = [*producers, *consumers_of.get(number, ())]
            first, last = min(rows_used), max(rows_used)
            consumers = tuple(n for n in consumers_of.get(number, ()) if n not in producers)
            unplaced.append(
                Stream(group_label(number, group), first, last, tuple(producers), consumers)
            )
    unplaced.sort(key=lambda group: group.first)
    ends: list[int] = []
    placed = []
    for stream in unplaced:
        column = next((n for n, end in enumerate(ends) if end < stream.first), len(ends))
        if column < MAX_COLUMNS:
            ends[column : column + 1] = [stream.last]
            placed.append(replace(stream, column=column))
        else:
            placed.append(stream)
    return placed


class StringTable:
    """Store texts that many layers have in common once, and refer to them by index."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}

    def index(self, text: str) -> int | None:
        """Add a text and return its index; None if it is empty."""
        return self.strings.setdefault(text, len(self.strings)) if text else None


def row_data(row: LayerRow, strings: StringTable, detail: int) -> Mapping[str, Any]:
    """Collect what the page shows of a layer, without unknown values.

    Args:
        row: the layer.
        strings: receives texts that layers have in common.
        detail: 2 for everything, 1 without the filter map, 0 without single filters.
    """
    analysis = row.analysis
    values: dict[str, Any] = {
        "name": truncate_middle(row.name),
        "filters": row.filters,
        "kept": row.kept,
        "groups": [strings.index(text) for text in row.groups],
        "reason": strings.index(row.reason),
        "error": row.error,
    }
    if analysis is not None:
        values |= {
            "macs_share": analysis.macs_share,
            "deviation": analysis.deviation,
            "least": analysis.least,
            "effective_rank": analysis.effective_rank,
            "verdict": strings.index(analysis.verdict),
        }
        if detail > 0:
            values |= {
                "norms": analysis.norms,
                "to_median": analysis.to_median,
                "removed": row.removed,
            }
        if detail > 1:
            values["places"] = analysis.places
    return {
        key: _round_numbers(value) for key, value in values.items() if value not in (None, (), [])
    }


def _round_numbers(value: Any) -> Any:
    """Round numbers to four digits to keep the page small."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list | tuple):
        return [_round_numbers(item) for item in value]
    return value
