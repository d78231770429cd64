"""The charts of a run's report as Vega-Lite specifications, built with `fpgm.report.charts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fpgm.report import charts
from fpgm.report.charts.style import (
    GREY,
    ROW_HEIGHT,
    SERIES,
    inline_data,
    load_altair,
    name_axis,
)
from fpgm.report.layers import LayerRow, truncate_middle
from fpgm.report.run import Run

MAX_GROUPS = 100
"""Groups in one chart; more would be illegible."""
MAX_POINTS = 65
"""Points of one curve."""
_MAX_NAME_LENGTH = 80
"""Characters shown of a name."""


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite specification with its heading and caption."""

    title: str
    caption: str
    spec: dict[str, Any]


def run_charts(run: Run, rows: Sequence[LayerRow]) -> list[Chart]:
    """List the charts that the run has data for."""
    return [
        *_training_chart(run),
        *_recovery_chart(rows),
        *_sensitivity_chart(run),
    ]


def page_spec(figure: Any) -> dict[str, Any]:
    """Convert an Altair chart for the page, which sets its width, fonts and colors."""
    spec: dict[str, Any] = figure.to_dict(validate=False)  # validation takes a second
    spec.pop("config", None)
    spec["width"] = "container"
    return spec


def _recovery_chart(rows: Sequence[LayerRow]) -> Iterator[Chart]:
    all_solved = [
        (row.name, *row.error) for row in rows if row.error is not None and any(row.error)
    ]
    solved = sorted(all_solved, key=lambda item: -(item[2] or 0))[:MAX_GROUPS]
    if not solved:
        return
    solved = [item for item in all_solved if item in solved]
    alt = load_altair()
    points = [
        {
            "layer": f"{number + 1}. {truncate_middle(name, _MAX_NAME_LENGTH)}",
            "when": stage,
            "error": value,
        }
        for number, (name, before, after) in enumerate(solved)
        for stage, value in (("before", before), ("after", after))
        if value is not None
    ]
    order = list(dict.fromkeys(row["layer"] for row in points))
    kinds = ["before", "after"]
    base = alt.Chart(inline_data(points)).encode(
        y=alt.Y("layer:N", sort=order, title=None, axis=name_axis()),
        x=alt.X(
            "error:Q", title="squared error", scale=alt.Scale(type="symlog"),
            axis=alt.Axis(orient="top", tickCount=5),
        ),
    )  # fmt: skip
    lines = base.mark_line(color=GREY, strokeWidth=1.5).encode(detail="layer:N")
    marks = base.mark_point(filled=True, size=55, opacity=1).encode(
        color=alt.Color(
            "when:N", sort=kinds, scale=alt.Scale(domain=kinds, range=[SERIES[1], SERIES[0]]),
            legend=alt.Legend(orient="top"),
        ),
        shape=alt.Shape(
            "when:N", sort=kinds, scale=alt.Scale(domain=kinds, range=["cross", "circle"]),
        ),
        tooltip=["layer:N", "when:N", alt.Tooltip("error:Q", format=".3g")],
    )  # fmt: skip
    chart = (lines + marks).properties(height=ROW_HEIGHT * len(order))
    note = (
        f" Shown are the {MAX_GROUPS} layers with the largest error."
        if len(solved) < len(all_solved)
        else ""
    )
    yield Chart(
        "Output error of each solved layer",
        "Squared error of a layer's output relative to its variance, before and after its weights "
        f"were solved by least squares.{note}",
        page_spec(chart),
    )


def _sensitivity_chart(run: Run) -> Iterator[Chart]:
    curves = [
        (number, group.name, [h for h in group.harm if h is not None])
        for number, group in enumerate(run.sensitivity.groups if run.sensitivity else ())
        if len(group.harm) > 1 and None not in group.harm
    ]
    if not curves:
        return
    shown = sorted(sorted(curves, key=lambda item: -item[2][-1])[:MAX_GROUPS])
    note = (
        f" Shown are the {MAX_GROUPS} of {len(curves)} most sensitive groups."
        if len(shown) < len(curves)
        else ""
    )
    errors = {
        f"{n + 1}. {truncate_middle(name, _MAX_NAME_LENGTH)}": downsample(harm)
        for n, name, harm in shown
    }
    most_sensitive = ", ".join(sorted(errors, key=lambda name: -errors[name][-1])[:3])
    yield Chart(
        "Sensitivity of each group",
        "Squared error of the model's output by the fraction of one group that is removed. Colors "
        "run from dark (first group) to light (last group). Most sensitive: "
        f"{most_sensitive}.{note}",
        page_spec(charts.sensitivity_curves(errors)),
    )


def downsample(values: Sequence[float], max_points: int = MAX_POINTS) -> list[float]:
    """Interpolate a curve linearly at evenly spaced points, at most `max_points`.

    >>> downsample([0.0, 1.0, 2.0, 3.0], 3)
    [0.0, 1.5, 3.0]
    """
    if len(values) <= max_points:
        return list(values)
    points = []
    for number in range(max_points):
        position = number * (len(values) - 1) / (max_points - 1)
        low = min(int(position), len(values) - 2)
        points.append(values[low] + (position - low) * (values[low + 1] - values[low]))
    return points


def _training_chart(run: Run) -> Iterator[Chart]:
    names = {
        "train_accuracy": "training",
        "test_accuracy": "test",
        "pruned_accuracy": "test, pruned",
        "average_accuracy": "test, averaged",
    }
    every = max(1, -(-len(run.metrics) // 1000))
    lines = {
        title: [
            (epoch.epoch, getattr(epoch, key))
            for epoch in run.metrics[::-every][::-1]
            if getattr(epoch, key) is not None
        ]
        for key, title in names.items()
    }
    lines = {title: points for title, points in lines.items() if points}
    if lines:
        pruned = run.plan is not None or any(name.startswith("prune.") for name in run.recipe)
        yield Chart(
            "Accuracy by epoch",
            f"During training{' and pruning' if pruned else ''}.",
            page_spec(charts.accuracy_by_epoch(lines)),
        )
