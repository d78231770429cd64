"""The charts of a report, as data for Vega-Lite: drawn by the functions that draw figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fpgm import figures
from fpgm.figures.style import KEPT, SERIES, altair, data
from fpgm.report.layers import LayerRow
from fpgm.report.run import Run


@dataclass(frozen=True)
class Chart:
    """A picture with its heading and a sentence that says what is to be seen."""

    title: str
    caption: str
    spec: dict[str, Any]


def charts(run: Run, rows: Sequence[LayerRow]) -> list[Chart]:
    """All that the folder has data for."""
    return [*_training(run), *_accuracy(run), *_widths(run), *_recovery(rows), *_times(run),
            *_sensitivity(run)]  # fmt: skip


def spec_of(figure: Any) -> dict[str, Any]:
    """A figure as it is drawn on a page: as wide as there is room, colours left to the page."""
    spec: dict[str, Any] = figure.to_dict()
    spec.pop("config", None)
    spec["width"] = "container"
    return spec


def tilted() -> Any:
    """An axis of names too long to stand side by side."""
    return altair().Axis(labelAngle=-60, labelLimit=90)


def _accuracy(run: Run) -> Iterator[Chart]:
    told = run.results.get("accuracy")
    if not isinstance(told, dict) or len(told) < 2:
        return
    alt = altair()
    names = list(told)
    rows = [{"model": name, "accuracy": share} for name, share in told.items()]
    bars = alt.Chart(data(rows)).encode(
        y=alt.Y("model:N", sort=names, title=None),
        x=alt.X(
            "accuracy:Q", axis=alt.Axis(format="%", tickCount=5), scale=alt.Scale(domain=[0, 1.1])
        ),
        tooltip=["model:N", alt.Tooltip("accuracy:Q", format=".2%")],
    )
    drawn = bars.mark_bar(color=KEPT, height=20) + bars.mark_text(
        align="left", dx=4, fontSize=11
    ).encode(text=alt.Text("accuracy:Q", format=".2%"))
    yield Chart(
        "Accuracy",
        "Of the original, of what is left at once, and of that once its layers were solved anew.",
        spec_of(drawn.properties(height=30 * len(names))),
    )


def _widths(run: Run) -> Iterator[Chart]:
    if run.plan is not None and run.plan.groups:
        yield Chart(
            "Units of every group",
            "A group is what several layers must keep or lose together.",
            spec_of(figures.widths(run.plan.groups)),
        )


def _recovery(rows: Sequence[LayerRow]) -> Iterator[Chart]:
    solved = [(row.name, *row.error) for row in rows if row.error is not None]
    if not solved:
        return
    alt = altair()
    names = [name for name, _, _ in solved]
    told = [
        {"layer": name, "when": when, "error": value}
        for name, before, after in solved
        for when, value in (("before", before), ("after", after))
        if value is not None
    ]
    drawn = (
        alt.Chart(data(told))
        .mark_point(filled=True, size=50)
        .encode(
            x=alt.X("layer:N", sort=names, title=None, axis=tilted()),
            y=alt.Y("error:Q", title="squared error", scale=alt.Scale(type="symlog")),
            color=alt.Color(
                "when:N", sort=["before", "after"],
                scale=alt.Scale(domain=["before", "after"], range=[SERIES[1], SERIES[0]]),
            ),
            shape=alt.Shape(
                "when:N", sort=["before", "after"],
                scale=alt.Scale(domain=["before", "after"], range=["cross", "circle"]),
            ),
            tooltip=["layer:N", "when:N", "error:Q"],
        )
        .properties(height=200)
    )  # fmt: skip
    yield Chart(
        "Error of every solved layer",
        "Squared error of what a layer gives out, as a share of its variance, before and after its "
        "weights were solved for.",
        spec_of(drawn),
    )


def _times(run: Run) -> Iterator[Chart]:
    rows = []
    for row in (run.bench or {}).get("rows", []):
        last = row["figures"][-1]
        if row["theory"] > 0 and last["faster"] > 0:
            rows.append(
                {
                    "runtime": row["backend"],
                    "model": f"batch {row['batch']}, threads {row['threads']}",
                    "theory": 1 - 1 / row["theory"],
                    "realised": 1 - 1 / last["faster"],
                }
            )
    if rows:
        spec = spec_of(figures.savings(rows))
        yield Chart(
            "Time against theory",
            "What share of the time goes, by runtime; on the dashed line it is the share of MACs.",
            spec,
        )


def _sensitivity(run: Run) -> Iterator[Chart]:
    groups = (run.sensitivity or {}).get("groups", [])
    if groups:
        harms = {f"{n + 1}. {own['name']}": own["harm"] for n, own in enumerate(groups)}
        yield Chart(
            "What every group can spare",
            "Squared error of the outputs by the share of a group that goes, the others whole; "
            "early groups are dark, late ones light.",
            spec_of(figures.sensitivity_curves(harms)),
        )


def _training(run: Run) -> Iterator[Chart]:
    names = {
        "train_accuracy": "training",
        "test_accuracy": "test",
        "pruned_accuracy": "test, pruned",
        "average_accuracy": "test, averaged",
    }
    lines = {
        title: [(m["epoch"], m[key]) for m in run.metrics if isinstance(m.get(key), int | float)]
        for key, title in names.items()
    }
    lines = {title: points for title, points in lines.items() if points}
    if lines:
        spec = spec_of(figures.accuracy_by_interval(lines))
        for part in (spec, *spec.get("layer", [])):
            if "x" in part.get("encoding", {}):
                part["encoding"]["x"]["title"] = "epoch"
        yield Chart("Accuracy by epoch", "While the network was trained and pruned.", spec)
