"""The network as rows: every layer, what goes of it, and the streams that run past it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fpgm.plan import Plan
from fpgm.report.run import Run


@dataclass
class LayerRow:
    """One layer of the report."""

    name: str
    filters: int
    kept: int
    removed: list[int]
    group: str
    """Of which group its units are, with how many other layers; empty if none."""
    why: str
    """Why it stays whole, or some of it; empty if nothing is to be said."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the analysis says."""
    error: tuple[float, float] | None = None
    """Before and after recovery."""
    lanes: list[dict[str, Any]] = field(default_factory=list)
    """Streams at its height: number, whether they begin, end, are written or read here."""


@dataclass(frozen=True)
class Stream:
    """Units that several layers write: where it begins and ends, and in which column it runs."""

    name: str
    layers: frozenset[str]
    first: int
    last: int
    column: int


def layer_rows(run: Run) -> list[LayerRow]:
    """All layers in the order they run, as far as that is known."""
    plan = run.plan
    if plan is None:
        return []
    cuts = {
        cut.tensor.rpartition(".")[0]: cut
        for cut in plan.cuts
        if cut.role in ("filter", "direction", "both") and cut.tensor.endswith("weight")
    }
    told = {str(own.get("layer")): own for own in (run.analysis or {}).get("layers", [])}
    names = list(told) or list(dict.fromkeys(n for g in plan.groups for n in g.layers))
    solved = {
        own["layer"]: (own["before"], own["after"])
        for own in (run.results.get("recovery") or {}).get("layers", [])
    }
    rows = []
    for name in names:
        own = told.get(name, {})
        cut = cuts.get(name)
        group = next((g for g in plan.groups if name in g.layers), None)
        filters = len(own.get("norms", ())) or (cut.size if cut else group.units if group else 0)
        removed = cut.removed() if cut is not None and cut.blocks == 1 else []
        others = len(group.layers) - 1 if group else 0
        shared = f"{group.name}, with {others} other layers" if group and others else ""
        rows.append(
            LayerRow(
                name,
                filters,
                filters - len(removed),
                removed,
                shared or (group.name if group else ""),
                _why(plan, name),
                dict(own),
                solved.get(name),
            )
        )
    _draw_lanes(rows, streams(plan, rows))
    return rows


def streams(plan: Plan, rows: Sequence[LayerRow]) -> list[Stream]:
    """Groups of several layers, each in the first column that is free all the way."""
    place = {row.name: number for number, row in enumerate(rows)}
    found: list[Stream] = []
    for group in plan.groups:
        writers = frozenset(name for name in group.layers if name in place)
        if len(writers) < 2:
            continue
        readers = {row.name for row in rows if group.name in row.told.get("reads", ())}
        spots = [place[name] for name in writers | readers]
        first, last = min(spots), max(spots)
        taken = {s.column for s in found if s.first <= last and first <= s.last}
        column = next(n for n in range(len(plan.groups) + 1) if n not in taken)
        found.append(Stream(group.name, writers, first, last, column))
    return found


def _draw_lanes(rows: Sequence[LayerRow], found: Sequence[Stream]) -> None:
    for number, row in enumerate(rows):
        reads = row.told.get("reads", ())
        for which, stream in enumerate(found):
            if stream.first <= number <= stream.last:
                row.lanes.append(
                    {
                        "column": stream.column,
                        "colour": which % 6,
                        "top": number > stream.first,
                        "bottom": number < stream.last,
                        "writes": row.name in stream.layers,
                        "reads": stream.name in reads,
                        "name": stream.name,
                    }
                )


def _why(plan: Plan, name: str) -> str:
    reasons = [frozen.reason for frozen in plan.frozen if name in frozen.layers]
    return "; ".join(dict.fromkeys(reasons))


def table_row(row: LayerRow) -> Mapping[str, Any]:
    """What the table and the details of a layer show."""
    keys = (
        "norms", "to_median", "places", "macs_share", "params_share", "deviation", "least",
        "effective_rank", "verdict", "overlap",
    )  # fmt: skip
    return {
        "name": row.name,
        "filters": row.filters,
        "kept": row.kept,
        "removed": row.removed,
        "group": row.group,
        "why": row.why,
        "error": row.error,
        **{key: _short(row.told.get(key)) for key in keys},
    }


def _short(value: Any) -> Any:
    """Numbers with four digits: a report is looked at, not computed with."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return value
