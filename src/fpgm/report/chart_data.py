"""The charts of a run's report as Vega-Lite specifications, built with `fpgm.report.charts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fpgm.report import charts
from fpgm.report.charts.style import KEPT, SERIES, inline_data, load_altair, name_axis
from fpgm.report.layers import LayerRow, truncate_middle
from fpgm.report.run import Run

MAX_GROUPS = 100
"""Groups in one chart; more would be illegible."""
MAX_POINTS = 65
"""Points of one curve."""
_MAX_NAME_LENGTH = 80
"""Characters shown of a name."""
_MIN_SPEEDUP = 0.01
"""Slower models are left out, as they would stretch the axis."""


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
        *_accuracy_chart(run),
        *_width_chart(run),
        *_recovery_chart(rows),
        *_speedup_chart(run),
        *_sensitivity_chart(run),
    ]


def page_spec(figure: Any) -> dict[str, Any]:
    """Convert an Altair chart for the page, which sets its width, fonts and colors."""
    spec: dict[str, Any] = figure.to_dict(validate=False)  # validation takes a second
    spec.pop("config", None)
    spec["width"] = "container"
    return spec


_RECOVERY_STEPS = {
    "solve": "after least squares",
    "norms": "after batch-norm re-estimation",
    "weights": "after data-free compensation",
}


def _accuracy_chart(run: Run) -> Iterator[Chart]:
    accuracy = run.results.accuracy
    if not isinstance(accuracy, dict):
        return
    values = {
        truncate_middle(name, _MAX_NAME_LENGTH): value
        for name, value in accuracy.items()
        if value is not None
    }
    if len(values) < 2:
        return
    alt = load_altair()
    bars = alt.Chart(
        inline_data(
            [
                {"model": name, "accuracy": value, "shown": f"{value:.2%}"}
                for name, value in values.items()
            ]
        )
    ).encode(
        y=alt.Y("model:N", sort=list(values), title=None),
        x=alt.X(
            "accuracy:Q",
            axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1]),
            scale=alt.Scale(domain=[0, 1.25]),
        ),
        tooltip=["model:N", alt.Tooltip("shown:N", title="accuracy")],
    )
    chart = bars.mark_bar(color=KEPT, height=20) + bars.mark_text(
        align="left", dx=4, fontSize=11
    ).encode(text="shown:N")
    count = run.results.test_images
    yield Chart(
        "Accuracy",
        _accuracy_caption(run) + ("" if count is None else f" Test images: {count:.0f}."),
        page_spec(chart.properties(height=30 * len(values))),
    )


def _accuracy_caption(run: Run) -> str:
    recovery = run.results.recovery
    if recovery is None:
        return "Original model and pruned model (compact)."
    how = _RECOVERY_STEPS.get(recovery.method, "after recovery")
    if recovery.steps:
        how += " and distillation"
    return f"Original model, pruned model (compact), and pruned model {how} (recovered)."


def _width_chart(run: Run) -> Iterator[Chart]:
    groups = () if run.plan is None else run.plan.groups
    if not groups:
        return
    most_removed = sorted(range(len(groups)), key=lambda n: groups[n].kept - groups[n].units)
    shown = sorted(most_removed[:MAX_GROUPS])
    note = (
        f" Shown are the {MAX_GROUPS} of {len(groups)} groups that lose the most units."
        if len(shown) < len(groups)
        else ""
    )
    yield Chart(
        "Units in each group",
        "A unit is a filter of one layer, or filters of several layers that can only be removed "
        f"together. Units of the same layers form a group.{note}",
        page_spec(charts.group_widths([groups[n] for n in shown], numbers=shown, axis_on_top=True)),
    )


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
    chart = (
        alt.Chart(inline_data(points))
        .mark_point(filled=True, size=50)
        .encode(
            x=alt.X(
                "layer:N", sort=order, title=None,
                axis=name_axis(),
            ),
            y=alt.Y("error:Q", title="squared error", scale=alt.Scale(type="symlog")),
            color=alt.Color(
                "when:N", sort=kinds, scale=alt.Scale(domain=kinds, range=[SERIES[1], SERIES[0]]),
            ),
            shape=alt.Shape(
                "when:N", sort=kinds, scale=alt.Scale(domain=kinds, range=["cross", "circle"]),
            ),
            tooltip=["layer:N", "when:N", "error:Q"],
        )
        .properties(height=200)
    )  # fmt: skip
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


def _speedup_chart(run: Run) -> Iterator[Chart]:
    rows = []
    warning = ""
    for row in run.bench.rows[:MAX_GROUPS] if run.bench else ():
        theory, faster = (
            row.theoretical_speedup,
            row.figures[-1].faster if len(row.figures) > 1 else None,
        )
        if theory is not None and faster is not None and min(theory, faster) > _MIN_SPEEDUP:
            warning = warning or row.crowd or ""
            rows.append(
                {
                    "runtime": truncate_middle(row.backend, _MAX_NAME_LENGTH),
                    "model": f"batch {row.batch}, threads {row.threads}",
                    "theory": 1 - 1 / theory,
                    "realised": 1 - 1 / faster,
                }
            )
    if rows:
        yield Chart(
            "Measured and theoretical time saving",
            "Fraction of the time saved in each runtime. On the dashed line it equals the fraction "
            "of MACs removed." + (f" Some times are unreliable: {warning}." if warning else ""),
            page_spec(charts.time_savings(rows)),
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
