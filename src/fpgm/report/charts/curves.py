"""Figures of what pruning does: accuracy and error by how much goes, saving against theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fpgm.report.charts.style import (
    COLUMN,
    DASHES,
    QUIET,
    SERIES,
    SHAPES,
    altair,
    data,
    names_axis,
    styled,
)

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Several lines by name: (place, value) from left to right."""
Bands = Mapping[str, Sequence[tuple[float, float, float]]]
"""Shades behind lines by name: (place, lower end, upper end) from left to right."""


def accuracy_by_macs(
    lines: Points, *, bands: Bands | None = None, original: float | None = None, width: int = COLUMN
) -> Any:
    """Accuracy against the share of MACs removed (the paper's Figure 4b), one line a method."""
    return _lines(lines, "MACs removed", "accuracy", original, width, percent_x=True, bands=bands)


def accuracy_by_interval(
    lines: Points, *, bands: Bands | None = None, original: float | None = None, width: int = COLUMN
) -> Any:
    """Accuracy against the epochs between two prunings (the paper's Figure 4a)."""
    across = "epochs between prunings"
    return _lines(lines, across, "accuracy", original, width, percent_x=False, bands=bands)


def accuracy_by_epoch(lines: Points, *, width: int = COLUMN) -> Any:
    """Accuracy against the epochs of a training, one line each way of counting it."""
    return _lines(lines, "epoch", "accuracy", None, width, percent_x=False)


def runs_by_macs(rows: Sequence[Mapping[str, Any]], *, width: int = COLUMN) -> Any:
    """Accuracy against the share of MACs removed, a point a run.

    Each row has `run`, `setting`, `macs` and `accuracy`; a line joins runs of one setting.
    """
    alt = altair()
    names = [row["run"] for row in rows]
    scale = alt.Scale(zero=False, padding=12)  # or the outermost points lie on the frame
    base = alt.Chart(data([dict(row) for row in rows])).encode(
        x=alt.X("macs:Q", title="MACs removed", axis=alt.Axis(format="%"), scale=scale),
        y=alt.Y("accuracy:Q", title="accuracy", axis=alt.Axis(format=".1%"), scale=scale),
    )
    line = base.mark_line(color=QUIET, strokeWidth=1).encode(detail="setting:N")
    points = base.mark_point(filled=True, size=70, opacity=0.9).encode(
        color=_colour(names, "run"),
        shape=_shape(names, "run"),
        tooltip=[
            "run:N", "setting:N",
            alt.Tooltip("macs:Q", format=".1%"), alt.Tooltip("accuracy:Q", format=".2%"),
        ],
    )  # fmt: skip
    return styled((line + points).properties(width=width, height=round(0.7 * width)))


def kept_by_group(
    groups: Sequence[str], kept: Mapping[str, Sequence[float]], *, width: int = COLUMN
) -> Any:
    """Which share of every group each run keeps: `kept` has one number a group, by run."""
    alt = altair()
    names = list(kept)
    rows = [
        {"run": name, "group": group, "kept": share}
        for name, shares in kept.items()
        for group, share in zip(groups, shares, strict=True)
    ]
    chart = (
        alt.Chart(data(rows))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=35), interpolate="step")
        .encode(
            x=alt.X("group:N", sort=list(groups), title=None, axis=names_axis()),
            y=alt.Y(
                "kept:Q",
                axis=alt.Axis(format="%"),
                scale=alt.Scale(domain=[0, 1]),
                title="units kept",
            ),
            color=_colour(names, "run"),
            shape=_shape(names, "run"),
            strokeDash=_dash(names, "run"),
            tooltip=["run:N", "group:N", alt.Tooltip("kept:Q", format=".1%")],
        )
        .properties(width=width, height=220)
    )
    return styled(chart)


def sensitivity_curves(harms: Mapping[str, Sequence[float]], *, width: int = COLUMN) -> Any:
    """Error of the outputs against the share of a group that goes, one line a group.

    `harms` has, by group, the error with no unit gone, with one, with two and so on.
    """
    alt = altair()
    rows = [
        {"group": name, "removed": gone / (len(harm) - 1), "error": value}
        for name, harm in harms.items()
        for gone, value in enumerate(harm)
        if len(harm) > 1
    ]
    chart = (
        alt.Chart(data(rows))
        .mark_line(opacity=0.7, strokeWidth=1.2)
        .encode(
            x=alt.X("removed:Q", title="share of the group removed", axis=alt.Axis(format="%")),
            y=alt.Y("error:Q", title="error of the outputs", scale=alt.Scale(type="symlog")),
            color=alt.Color(
                "group:N", sort=list(harms), legend=None,
                scale=alt.Scale(scheme=alt.SchemeParams("viridis", extent=[0, 0.85])),
            ),
            tooltip=["group:N", alt.Tooltip("removed:Q", format=".0%"), "error:Q"],
        )
        .properties(width=width, height=round(0.7 * width))
    )  # fmt: skip
    return styled(chart)


def savings(rows: Sequence[Mapping[str, Any]], *, width: int = COLUMN) -> Any:
    """Share of the time that goes against the share of MACs, by runtime; the line is theory.

    Each row has `runtime`, `model`, `theory` and `realised`, as shares.
    """
    alt = altair()
    top = max([0.1, *(max(row["theory"], row["realised"]) for row in rows)]) * 1.1
    scale = alt.Scale(domain=[min(0.0, *(row["realised"] for row in rows)), top], nice=False)
    names = list(dict.fromkeys(row["runtime"] for row in rows))
    line = (
        alt.Chart(data([{"theory": 0.0, "realised": 0.0}, {"theory": top, "realised": top}]))
        .mark_line(color=QUIET, strokeDash=[4, 3])
        .encode(x="theory:Q", y="realised:Q")
    )
    points = (
        alt.Chart(data([dict(row) for row in rows]))
        .mark_point(filled=True, size=60, opacity=0.85)
        .encode(
            x=alt.X("theory:Q", scale=scale, title="MACs removed", axis=alt.Axis(format="%")),
            y=alt.Y("realised:Q", scale=scale, title="time removed", axis=alt.Axis(format="%")),
            color=_colour(names, "runtime"),
            shape=_shape(names, "runtime"),
            tooltip=[
                "model:N", "runtime:N",
                alt.Tooltip("theory:Q", format=".1%"), alt.Tooltip("realised:Q", format=".1%"),
            ],
        )
    )  # fmt: skip
    return styled((line + points).properties(width=width, height=width))


def _lines(
    lines: Points,
    across: str,
    up: str,
    original: float | None,
    width: int,
    *,
    percent_x: bool,
    bands: Bands | None = None,
) -> Any:
    alt = altair()
    rows = [{"line": name, across: x, up: y} for name, points in lines.items() for x, y in points]
    names = list(lines)
    axis = alt.Axis(format="%") if percent_x else alt.Axis(tickMinStep=1)
    drawn = (
        alt.Chart(data(rows))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=40))
        .encode(
            x=alt.X(f"{across}:Q", axis=axis, scale=alt.Scale(zero=False)),
            y=alt.Y(f"{up}:Q", axis=alt.Axis(format=".1%"), scale=alt.Scale(zero=False)),
            color=_colour(names, "line"),
            shape=_shape(names, "line"),
            strokeDash=_dash(names, "line"),
            tooltip=["line:N", f"{across}:Q", alt.Tooltip(f"{up}:Q", format=".2%")],
        )
    )
    if shades := [
        {"line": name, across: x, "low": low, "high": high}
        for name, places in (bands or {}).items()
        for x, low, high in places
    ]:
        shade = alt.Chart(data(shades)).mark_area(opacity=0.2)
        drawn = (
            shade.encode(
                x=alt.X(f"{across}:Q"),
                y=alt.Y("low:Q", title=up),
                y2="high:Q",
                color=_colour(names, "line"),
            )
            + drawn
        )
    if original is not None:
        rule = alt.Chart(data([{up: original}])).mark_rule(color=QUIET, strokeDash=[4, 3])
        drawn = drawn + rule.encode(y=f"{up}:Q")
    return styled(drawn.properties(width=width, height=round(0.7 * width)))


def _colour(names: Sequence[str], field: str) -> Any:
    alt = altair()
    return alt.Color(
        f"{field}:N", sort=list(names),
        scale=alt.Scale(domain=list(names), range=_some(SERIES, names)),
    )  # fmt: skip


def _shape(names: Sequence[str], field: str) -> Any:
    alt = altair()
    return alt.Shape(
        f"{field}:N", sort=list(names),
        scale=alt.Scale(domain=list(names), range=_some(SHAPES, names)),
    )  # fmt: skip


def _dash(names: Sequence[str], field: str) -> Any:
    alt = altair()
    return alt.StrokeDash(
        f"{field}:N", sort=list(names),
        scale=alt.Scale(domain=list(names), range=_some(DASHES, names)),
    )  # fmt: skip


def _some(values: Sequence[Any], names: Sequence[str]) -> list[Any]:
    return [values[number % len(values)] for number in range(len(names))]
