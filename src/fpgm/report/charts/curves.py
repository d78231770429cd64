"""Line and scatter charts: accuracy by MACs, interval or epoch; sensitivity; time savings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fpgm.report.charts.style import (
    COLUMN_WIDTH,
    DASHES,
    GREY,
    ROW_HEIGHT,
    SERIES,
    SHAPES,
    apply_style,
    inline_data,
    load_altair,
    name_axis,
)

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Lines by name, each a sequence of (x, y) from left to right."""
Bands = Mapping[str, Sequence[tuple[float, float, float]]]
"""Shaded bands by line name, each a sequence of (x, lower, upper) from left to right."""
_MAX_LABELS = 12
"""Whole numbers on an axis that are all labeled."""
_RUN_HEIGHT = 9
"""Points per run within the row of a group."""


def accuracy_by_macs(
    lines: Points,
    *,
    bands: Bands | None = None,
    original: float | None = None,
    width: int = COLUMN_WIDTH,
) -> Any:
    """Plot accuracy against the fraction of MACs removed (the paper's Figure 4b)."""
    return _line_chart(
        lines, "MACs removed", "accuracy", original, width, percent_x=True, bands=bands
    )


def accuracy_by_interval(
    lines: Points,
    *,
    bands: Bands | None = None,
    original: float | None = None,
    width: int = COLUMN_WIDTH,
) -> Any:
    """Plot accuracy against the epochs between two pruning steps (the paper's Figure 4a)."""
    x_title = "epochs between pruning steps"
    return _line_chart(lines, x_title, "accuracy", original, width, percent_x=False, bands=bands)


def accuracy_by_epoch(lines: Points, *, width: int = COLUMN_WIDTH) -> Any:
    """Plot accuracy against training epochs, one line per kind of accuracy."""
    return _line_chart(lines, "epoch", "accuracy", None, width, percent_x=False)


def runs_by_macs(
    rows: Sequence[Mapping[str, Any]], *, among: Sequence[str] = (), width: int = COLUMN_WIDTH
) -> Any:
    """Plot accuracy against the fraction of MACs removed, one point per run.

    Args:
        rows: each has `run`, `setting`, `macs` and `accuracy`; a line joins equal settings.
        among: all runs, if other charts show more of them: each keeps its color.
        width: in points.
    """
    alt = load_altair()
    names = [row["run"] for row in rows]
    x_scale, y_scale = (
        alt.Scale(domain=_padded_range([row[key] for row in rows], least), nice=False)
        for key, least in (("macs", 0.1), ("accuracy", 0.02))
    )
    base = alt.Chart(inline_data([dict(row) for row in rows])).encode(
        x=alt.X(
            "macs:Q", title="MACs removed", scale=x_scale, axis=alt.Axis(format="%", tickCount=5)
        ),
        y=alt.Y(
            "accuracy:Q", title="accuracy", scale=y_scale, axis=alt.Axis(format=".1%", tickCount=6)
        ),
    )
    line = base.mark_line(color=GREY, strokeWidth=1).encode(detail="setting:N")
    points = base.mark_point(filled=True, size=70, opacity=0.9).encode(
        color=_color_scale(names, "run", among),
        shape=_shape_scale(names, "run", among),
        tooltip=[
            "run:N", "setting:N",
            alt.Tooltip("macs:Q", format=".1%"), alt.Tooltip("accuracy:Q", format=".2%"),
        ],
    )  # fmt: skip
    return apply_style((line + points).properties(width=width, height=round(0.7 * width)))


def _padded_range(values: Sequence[float], least: float) -> list[float]:
    """Return a range around fractions that is at least so long, and keeps points off the frame.

    >>> [round(end, 3) for end in _padded_range([0.5, 0.5], 0.1)]
    [0.44, 0.56]
    """
    low, high = min(values), max(values)
    margin = max(0.0, least - (high - low)) / 2 + 0.1 * max(least, high - low)
    return [low - margin, high + margin]


def kept_by_group(
    groups: Sequence[str],
    kept: Mapping[str, Sequence[float]],
    *,
    among: Sequence[str] = (),
    width: int = COLUMN_WIDTH,
) -> Any:
    """Plot the fraction of each group's units that each run keeps.

    Args:
        groups: names of the groups.
        kept: by run, one fraction per group.
        among: all runs, if other charts show more of them: each keeps its color.
        width: in points.
    """
    alt = load_altair()
    names = list(kept)
    rows = [
        {"run": name, "group": group, "kept": fraction}
        for name, fractions in kept.items()
        for group, fraction in zip(groups, fractions, strict=True)
    ]
    row_height = max(ROW_HEIGHT, _RUN_HEIGHT * len(names) + 4)
    chart = (
        alt.Chart(inline_data(rows))
        .mark_point(filled=True, size=45, opacity=1)
        .encode(
            y=alt.Y("group:N", sort=list(groups), title=None, axis=name_axis()),
            yOffset=alt.YOffset("run:N", sort=names),  # equal values would hide each other
            x=alt.X(
                "kept:Q", title="units kept", scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format="%", orient="top"),
            ),
            color=_color_scale(names, "run", among),
            shape=_shape_scale(names, "run", among),
            tooltip=["run:N", "group:N", alt.Tooltip("kept:Q", format=".1%")],
        )
        .properties(width=width, height=row_height * len(groups))
    )  # fmt: skip
    return apply_style(chart)


def sensitivity_curves(errors: Mapping[str, Sequence[float]], *, width: int = COLUMN_WIDTH) -> Any:
    """Plot the output error against the fraction of a group that is removed, one line per group.

    Args:
        errors: by group, the error with 0, 1, 2, … units removed.
        width: in points.
    """
    alt = load_altair()
    rows = [
        {"group": name, "removed": count / (len(curve) - 1), "error": value}
        for name, curve in errors.items()
        for count, value in enumerate(curve)
        if len(curve) > 1
    ]
    chart = (
        alt.Chart(inline_data(rows))
        .mark_line(opacity=0.7, strokeWidth=1.2)
        .encode(
            x=alt.X("removed:Q", title="fraction of the group removed", axis=alt.Axis(format="%")),
            y=alt.Y("error:Q", title="output error", scale=alt.Scale(type="symlog")),
            color=alt.Color(
                "group:N", sort=list(errors), legend=None,
                scale=alt.Scale(scheme=alt.SchemeParams("viridis", extent=[0, 0.85])),
            ),
            tooltip=["group:N", alt.Tooltip("removed:Q", format=".0%"), "error:Q"],
        )
        .properties(width=width, height=round(0.7 * width))
    )  # fmt: skip
    return apply_style(chart)


def time_savings(rows: Sequence[Mapping[str, Any]], *, width: int = COLUMN_WIDTH) -> Any:
    """Plot the fraction of time saved against the fraction of MACs removed, by runtime.

    Args:
        rows: each has `runtime`, `model`, and the fractions `theory` (MACs) and `realised` (time).
        width: in points.
    """
    alt = load_altair()
    top = max([0.1, *(max(row["theory"], row["realised"]) for row in rows)]) * 1.1
    scale = alt.Scale(domain=[min(0.0, *(row["realised"] for row in rows)), top], nice=False)
    names = list(dict.fromkeys(row["runtime"] for row in rows))
    line = (
        alt.Chart(inline_data([{"theory": 0.0, "realised": 0.0}, {"theory": top, "realised": top}]))
        .mark_line(color=GREY, strokeDash=[4, 3])
        .encode(x="theory:Q", y="realised:Q")
    )
    points = (
        alt.Chart(inline_data([dict(row) for row in rows]))
        .mark_point(filled=True, size=60, opacity=0.85)
        .encode(
            x=alt.X("theory:Q", scale=scale, title="MACs removed", axis=alt.Axis(format="%")),
            y=alt.Y("realised:Q", scale=scale, title="time removed", axis=alt.Axis(format="%")),
            color=_color_scale(names, "runtime"),
            shape=_shape_scale(names, "runtime"),
            tooltip=[
                "model:N", "runtime:N",
                alt.Tooltip("theory:Q", format=".1%"), alt.Tooltip("realised:Q", format=".1%"),
            ],
        )
    )  # fmt: skip
    return apply_style((line + points).properties(width=width, height=width))


def _line_chart(
    lines: Points,
    x_title: str,
    y_title: str,
    original: float | None,
    width: int,
    *,
    percent_x: bool,
    bands: Bands | None = None,
) -> Any:
    """Draw lines with points.

    Args:
        lines: Points (x, y) of every line, by name.
        x_title: Title of the x axis.
        y_title: Title of the y axis.
        original: Value of the unpruned model, drawn as a dashed line.
        width: In pixels.
        percent_x: x values are fractions, shown in percent; otherwise they are integers.
        bands: Lower and upper values around every line.
    """
    alt = load_altair()
    rows = [
        {"line": name, x_title: x, y_title: y} for name, points in lines.items() for x, y in points
    ]
    names = list(lines)
    axis = alt.Axis(format="%") if percent_x else _integer_axis(lines)
    chart = (
        alt.Chart(inline_data(rows))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=40))
        .encode(
            x=alt.X(f"{x_title}:Q", axis=axis, scale=alt.Scale(zero=False)),
            y=alt.Y(f"{y_title}:Q", axis=alt.Axis(format=".1%"), scale=alt.Scale(zero=False)),
            color=_color_scale(names, "line"),
            shape=_shape_scale(names, "line"),
            strokeDash=_dash_scale(names, "line"),
            tooltip=["line:N", f"{x_title}:Q", alt.Tooltip(f"{y_title}:Q", format=".2%")],
        )
    )
    if bands_data := [
        {"line": name, x_title: x, "low": low, "high": high}
        for name, points in (bands or {}).items()
        for x, low, high in points
    ]:
        area = alt.Chart(inline_data(bands_data)).mark_area(opacity=0.2)
        chart = (
            area.encode(
                x=alt.X(f"{x_title}:Q"),
                y=alt.Y("low:Q", title=y_title),
                y2="high:Q",
                color=_color_scale(names, "line"),
            )
            + chart
        )
    if original is not None:
        rule = alt.Chart(inline_data([{y_title: original}])).mark_rule(
            color=GREY, strokeDash=[4, 3]
        )
        chart = chart + rule.encode(y=f"{y_title}:Q")
    return apply_style(chart.properties(width=width, height=round(0.7 * width)))


def _integer_axis(lines: Points) -> Any:
    """Create an axis with a label at every value, or at few of them if there are many."""
    values = {x for points in lines.values() for x, _ in points}
    few = {"values": sorted(values)} if len(values) <= _MAX_LABELS else {}
    return load_altair().Axis(format="d", tickMinStep=1, **few)


def _color_scale(names: Sequence[str], field: str, among: Sequence[str] = ()) -> Any:
    return _encode_names(load_altair().Color, SERIES, names, field, among)


def _shape_scale(names: Sequence[str], field: str, among: Sequence[str] = ()) -> Any:
    return _encode_names(load_altair().Shape, SHAPES, names, field, among)


def _dash_scale(names: Sequence[str], field: str) -> Any:
    return _encode_names(load_altair().StrokeDash, DASHES, names, field, ())


def _encode_names(
    channel: Any, values: Sequence[Any], names: Sequence[str], field: str, among: Sequence[str]
) -> Any:
    """Encode names by values in order, which start over when there are more names than values.

    Args:
        channel: of the encoding.
        values: colors, shapes or dashes.
        names: that are drawn.
        field: that holds the names.
        among: all names of several charts, so that a name looks the same in each; or empty.
    """
    order = list(among or names)
    cycle = [values[order.index(name) % len(values)] for name in names]
    scale = load_altair().Scale(domain=list(names), range=cycle)
    return channel(f"{field}:N", sort=list(names), scale=scale)
