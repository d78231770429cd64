"""Several runs side by side: what was asked of each, what came out, and how they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpgm import figures
from fpgm.figures.style import SERIES, altair, data
from fpgm.report.charts import Chart, spec_of, tilted
from fpgm.report.headline import cards
from fpgm.report.run import Run

_ASKED = ("rate", "macs", "params", "latency", "criterion", "distance", "residual", "allocate",
          "recover", "distil", "align")  # fmt: skip


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page of a comparison is filled with."""
    names = _distinct([run.name for run in runs])
    figures_of = [{card.name: card for card in cards(run)} for run in runs]
    heads = list(dict.fromkeys(name for own in figures_of for name in own))
    asked = [run.results.get("asked") or {} for run in runs]
    kept = [key for key in _ASKED if any(key in own for own in asked)]
    return {
        "names": names,
        "heads": heads,
        "figures": figures_of,
        "asked_keys": kept,
        "asked": [{key: str(own.get(key, "")) for key in kept} for own in asked],
        "charts": [*_curve(names, runs), *_kept(names, runs)],
    }


def _curve(names: Sequence[str], runs: Sequence[Run]) -> list[Chart]:
    """Accuracy against MACs removed, a line a criterion."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        told = run.results.get("accuracy")
        if run.plan is not None and isinstance(told, dict):
            share = told.get("recovered", told.get("compact"))
            line = str((run.results.get("asked") or {}).get("criterion", "fpgm"))
            if share is not None:
                lines.setdefault(line, []).append((run.plan.macs_removed, share))
    if sum(len(points) for points in lines.values()) < 2:
        return []
    drawn = figures.accuracy_by_macs({name: sorted(points) for name, points in lines.items()})
    return [Chart("Accuracy by MACs removed", "One line a criterion.", spec_of(drawn))]


def _kept(names: Sequence[str], runs: Sequence[Run]) -> list[Chart]:
    """Which share of every group each run keeps."""
    alt = altair()
    rows = [
        {"run": name, "group": group.name, "kept": group.kept / group.units}
        for name, run in zip(names, runs, strict=True)
        if run.plan is not None
        for group in run.plan.groups
    ]
    if not rows:
        return []
    order = list(dict.fromkeys(row["group"] for row in rows))
    colours = [SERIES[n % len(SERIES)] for n in range(len(names))]
    drawn = (
        alt.Chart(data(rows))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=30), interpolate="step")
        .encode(
            x=alt.X("group:N", sort=order, title=None, axis=tilted()),
            y=alt.Y("kept:Q", axis=alt.Axis(format="%"), title="units kept"),
            color=alt.Color(
                "run:N", sort=list(names), scale=alt.Scale(domain=list(names), range=colours)
            ),
            tooltip=["run:N", "group:N", alt.Tooltip("kept:Q", format=".1%")],
        )
        .properties(height=220)
    )
    return [Chart("What stays of every group", "One line a run.", spec_of(drawn))]


def _distinct(names: Sequence[str]) -> list[str]:
    """Names that differ: folders of the same name get a number.

    >>> _distinct(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    found: list[str] = []
    for name in names:
        count = sum(other == name or other.startswith(f"{name} (") for other in found)
        found.append(f"{name} ({count + 1})" if count else name)
    return found
