"""The network as rows: every layer, what goes of it, and the streams that run past it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fpgm.pruning.plan import Group, Plan
from fpgm.report.records import LayerTold, Number
from fpgm.report.run import Run
from fpgm.utils.parameter_info import layer_of

MOST_COLUMNS = 12
"""Streams side by side; there is no room for more."""
_LONGEST = 300
"""Letters of a name."""


@dataclass(frozen=True)
class LayerRow:
    """One layer of the report."""

    name: str
    filters: int | None
    """None where nothing tells: the layer stays whole, then."""
    kept: int | None
    removed: tuple[int, ...]
    """Numbers of the filters that go, where single ones are known of."""
    groups: tuple[str, ...]
    """Groups its units are of, each with how many other layers."""
    why: str
    """Why it stays whole, or some of it; empty if nothing is to be said."""
    told: LayerTold | None = None
    """What the analysis says."""
    error: tuple[Number, Number] | None = None
    """Before and after recovery."""


@dataclass(frozen=True)
class Stream:
    """Units that several layers write: from which row to which, and in which column it runs."""

    name: str
    first: int
    last: int
    writes: tuple[int, ...]
    """Rows of the layers that write it."""
    reads: tuple[int, ...]
    column: int = -1


def layer_rows(run: Run) -> list[LayerRow]:
    """All layers: those the analysis knows in the order they run, then what else the plan names."""
    plan = run.plan
    if plan is None:
        return []
    told = {own.layer: own for own in (run.analysis.layers if run.analysis else ())}
    cuts = plan.filters()
    groups = _groups_of(plan)
    reasons: dict[str, list[str]] = {}
    for frozen in plan.frozen:
        for name in frozen.layers:
            reasons.setdefault(name, []).append(frozen.reason)
    solved = {
        own.layer: (own.before, own.after)
        for own in (run.results.recovery.layers if run.results.recovery else ())
    }
    tensors = {cut.tensor for cut in plan.cuts} | set(told)
    known = {*told, *(name if name in groups else layer_of(name) for name in told)}
    named = dict.fromkeys([*groups, *reasons, *(n for n in cuts if n not in tensors)])
    rows = []
    for name in [*told, *(other for other in named if other not in known)]:
        own, cut = told.get(name), cuts.get(name)
        if own is not None and cut is not None and len(own.norms) != cut.total:
            own = replace(own, norms=(), to_median=(), places=())  # of another network
        filters = cut.total if cut is not None else len(own.norms) if own is not None else None
        path = name if name in groups or name in reasons else layer_of(name)
        rows.append(
            LayerRow(
                name,
                filters,
                filters if cut is None else cut.kept,
                # Only as many as there are norms: a plan may claim any number of filters.
                tuple(cut.removed()) if cut is not None and own is not None and own.norms else (),
                tuple(_group_text(n, plan.groups[n]) for n in groups.get(path, ())),
                "; ".join(dict.fromkeys(reasons.get(path, ()))),
                own,
                solved.get(name),
            )
        )
    return rows


def _groups_of(plan: Plan) -> dict[str, list[int]]:
    """Numbers of the groups that each layer has units in."""
    found: dict[str, list[int]] = {}
    for number, group in enumerate(plan.groups):
        for name in dict.fromkeys(group.layers):
            found.setdefault(name, []).append(number)
    return found


def numbered(number: int, group: Group) -> str:
    """A group by number and name: names alone need not differ."""
    return f"{number + 1}. {clip(group.name)}"


def _group_text(number: int, group: Group) -> str:
    others = len(set(group.layers)) - 1
    if not others:  # then the group is called what the layer is
        return f"{number + 1}, this layer alone"
    return f"{numbered(number, group)}, with {others} other layer{'s' * (others > 1)}"


def clip(text: str, most: int = _LONGEST) -> str:
    """A text without its middle, if it is long.

    >>> clip("features.denseblock4.denselayer16.conv2", 20)
    'features.d…er16.conv2'
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def streams(run: Run, rows: Sequence[LayerRow]) -> list[Stream]:
    """Groups of several layers from top to bottom, each in the first column that is free.

    Those for which there is no column left have none (-1).
    """
    plan, place = run.plan, {row.name: number for number, row in enumerate(rows)}
    if plan is None:
        return []
    readers: dict[int, list[int]] = {}
    same = run.analysis is not None and run.analysis.groups == tuple(g.name for g in plan.groups)
    for number, row in enumerate(rows):
        for group in row.told.read_groups if row.told is not None and same else ():
            readers.setdefault(group, []).append(number)
    found = []
    for number, own in enumerate(plan.groups):
        writers = sorted({place[name] for name in own.layers if name in place})
        if len(writers) > 1:
            spots = [*writers, *readers.get(number, ())]
            first, last = min(spots), max(spots)
            reads = tuple(n for n in readers.get(number, ()) if n not in writers)
            found.append(Stream(numbered(number, own), first, last, tuple(writers), reads))
    found.sort(key=lambda own: own.first)
    ends: list[int] = []
    placed = []
    for stream in found:
        column = next((n for n, end in enumerate(ends) if end < stream.first), len(ends))
        if column < MOST_COLUMNS:
            ends[column : column + 1] = [stream.last]
            placed.append(replace(stream, column=column))
        else:
            placed.append(stream)
    return placed


class Phrases:
    """Texts that many layers share, each written once."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def number(self, text: str) -> int | None:
        """Of a text; none if it is empty."""
        return self.all.setdefault(text, len(self.all)) if text else None


def embedded_row(row: LayerRow, phrases: Phrases, detail: int) -> Mapping[str, Any]:
    """What the page is told of a layer, without what is not known.

    With less `detail` than 2 the map of its filters is left out, with less than 1 all of them.
    """
    own = row.told
    values: dict[str, Any] = {
        "name": clip(row.name),
        "filters": row.filters,
        "kept": row.kept,
        "groups": [phrases.number(text) for text in row.groups],
        "why": phrases.number(row.why),
        "error": row.error,
    }
    if own is not None:
        values |= {
            "macs_share": own.macs_share,
            "deviation": own.deviation,
            "least": own.least,
            "effective_rank": own.effective_rank,
            "verdict": phrases.number(own.verdict),
        }
        if detail > 0:
            values |= {"norms": own.norms, "to_median": own.to_median, "removed": row.removed}
        if detail > 1:
            values["places"] = own.places
    return {key: _short(value) for key, value in values.items() if value not in (None, (), [])}


def _short(value: Any) -> Any:
    """Numbers with four digits: a report is looked at, not computed with."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value
