"""The charts of a report, as data for Vega-Lite: drawn by the functions that draw figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fpgm.report import charts as figures
from fpgm.report.charts.style import KEPT, SERIES, altair, data, names_axis
from fpgm.report.layers import LayerRow, clip
from fpgm.report.run import Run

MOST_GROUPS = 100
"""In one chart; of more, none could be told from its neighbours."""
MOST_POINTS = 65
"""Of one curve."""
_LONGEST = 80
"""Letters of a name in a chart."""
_SLOWEST = 0.01
"""Times as fast as the original; what is slower would leave no room for the rest."""


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
    """A figure as it is drawn on a page: as wide as there is room, letters left to the page."""
    spec: dict[str, Any] = figure.to_dict(validate=False)  # a second for thousands of rows
    spec.pop("config", None)
    spec["width"] = "container"
    return spec


_RECOVERED = {
    "solve": "after its layers were solved anew",
    "norms": "after its batch norms were measured anew",
    "weights": "after what is left was made up for without data",
}


def _accuracy(run: Run) -> Iterator[Chart]:
    told = run.results.accuracy
    if not isinstance(told, dict):
        return
    shares = {clip(name, _LONGEST): share for name, share in told.items() if share is not None}
    if len(shares) < 2:
        return
    alt = altair()
    bars = alt.Chart(
        data(
            [
                {"model": name, "accuracy": share, "shown": f"{share:.2%}"}
                for name, share in shares.items()
            ]
        )
    ).encode(
        y=alt.Y("model:N", sort=list(shares), title=None),
        x=alt.X(
            "accuracy:Q",
            axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1]),
            scale=alt.Scale(domain=[0, 1.25]),
        ),
        tooltip=["model:N", alt.Tooltip("shown:N", title="accuracy")],
    )
    drawn = bars.mark_bar(color=KEPT, height=20) + bars.mark_text(
        align="left", dx=4, fontSize=11
    ).encode(text="shown:N")
    count = run.results.test_images
    yield Chart(
        "Accuracy",
        _accuracy_caption(run) + ("" if count is None else f" Test pictures: {count:.0f}."),
        spec_of(drawn.properties(height=30 * len(shares))),
    )


def _accuracy_caption(run: Run) -> str:
    recovery = run.results.recovery
    if recovery is None:
        return "Of the original, and of what is left of it (compact)."
    how = _RECOVERED.get(recovery.method, "after recovery")
    if recovery.steps:
        how += " and it was trained towards the original's answers"
    return f"Of the original, of what is left of it (compact), and {how} (recovered)."


def _widths(run: Run) -> Iterator[Chart]:
    groups = () if run.plan is None else run.plan.groups
    if not groups:
        return
    dearest = sorted(range(len(groups)), key=lambda n: groups[n].kept - groups[n].units)
    shown = sorted(dearest[:MOST_GROUPS])
    only = (
        f" The {MOST_GROUPS} of {len(groups)} groups that lose most."
        if len(shown) < len(groups)
        else ""
    )
    yield Chart(
        "Units of every group",
        "A unit is a filter of one layer, or what several layers must keep or lose together; the "
        f"units of the same layers are a group.{only}",
        spec_of(figures.widths([groups[n] for n in shown], numbers=shown, axis_on_top=True)),
    )


def _recovery(rows: Sequence[LayerRow]) -> Iterator[Chart]:
    all_solved = [
        (row.name, *row.error) for row in rows if row.error is not None and any(row.error)
    ]
    solved = sorted(all_solved, key=lambda own: -(own[2] or 0))[:MOST_GROUPS]
    if not solved:
        return
    solved = [own for own in all_solved if own in solved]
    alt = altair()
    told = [
        {"layer": f"{number + 1}. {clip(name, _LONGEST)}", "when": when, "error": value}
        for number, (name, before, after) in enumerate(solved)
        for when, value in (("before", before), ("after", after))
        if value is not None
    ]
    order = list(dict.fromkeys(row["layer"] for row in told))
    kinds = ["before", "after"]
    drawn = (
        alt.Chart(data(told))
        .mark_point(filled=True, size=50)
        .encode(
            x=alt.X(
                "layer:N", sort=order, title=None,
                axis=names_axis(),
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
    only = f" The {MOST_GROUPS} with the largest error." if len(solved) < len(all_solved) else ""
    yield Chart(
        "Error of every solved layer",
        "Squared error of what a layer gives out, as a share of its variance, before and after its "
        f"weights were solved for.{only}",
        spec_of(drawn),
    )


def _times(run: Run) -> Iterator[Chart]:
    rows = []
    doubt = ""
    for row in run.bench.rows[:MOST_GROUPS] if run.bench else ():
        theory, faster = row.promised, row.figures[-1].faster if len(row.figures) > 1 else None
        if theory is not None and faster is not None and min(theory, faster) > _SLOWEST:
            doubt = doubt or row.crowd or ""
            rows.append(
                {
                    "runtime": clip(row.backend, _LONGEST),
                    "model": f"batch {row.batch}, threads {row.threads}",
                    "theory": 1 - 1 / theory,
                    "realised": 1 - 1 / faster,
                }
            )
    if rows:
        yield Chart(
            "Time against theory",
            "What share of the time goes, by runtime; on the dashed line it is the share of MACs."
            + (f" Not all of it is to be relied on: {doubt}." if doubt else ""),
            spec_of(figures.savings(rows)),
        )


def _sensitivity(run: Run) -> Iterator[Chart]:
    known = [
        (number, group.name, [h for h in group.harm if h is not None])
        for number, group in enumerate(run.sensitivity.groups if run.sensitivity else ())
        if len(group.harm) > 1 and None not in group.harm
    ]
    if not known:
        return
    shown = sorted(sorted(known, key=lambda own: -own[2][-1])[:MOST_GROUPS])
    only = (
        f" The {MOST_GROUPS} of {len(known)} groups that can spare least."
        if len(shown) < len(known)
        else ""
    )
    harms = {f"{n + 1}. {clip(name, _LONGEST)}": thinned(harm) for n, name, harm in shown}
    dearest = ", ".join(sorted(harms, key=lambda name: -harms[name][-1])[:3])
    yield Chart(
        "What every group can spare",
        "Squared error of the outputs by the share of a group that goes, the others whole; colours "
        f"run from dark, the first group, to light, the last. Dearest: {dearest}.{only}",
        spec_of(figures.sensitivity_curves(harms)),
    )


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[float]:
    """A curve at no more than so many places, evenly spaced and on straight lines between.

    >>> thinned([0.0, 1.0, 2.0, 3.0], 3)
    [0.0, 1.5, 3.0]
    """
    if len(values) <= most:
        return list(values)
    found = []
    for number in range(most):
        place = number * (len(values) - 1) / (most - 1)
        low = min(int(place), len(values) - 2)
        found.append(values[low] + (place - low) * (values[low + 1] - values[low]))
    return found


def _training(run: Run) -> Iterator[Chart]:
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
            f"While the network was trained{' and pruned' if pruned else ''}.",
            spec_of(figures.accuracy_by_epoch(lines)),
        )
