"""Charts of one layer's filters: the distribution of their norms, and a map around their median."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from fpgm.report.analysis.result import LayerAnalysis
from fpgm.report.charts.style import (
    COLUMN_WIDTH,
    KEPT,
    MEDIAN,
    REMOVED,
    RUG,
    apply_style,
    inline_data,
    load_altair,
)

_HEIGHT = 150
_FLOOR = 1e-8
"""Smallest norm on a logarithmic axis; norms of zero are drawn here."""


def norm_distribution(
    layer: LayerAnalysis, *, log: bool = False, title: str | None = None, width: int = COLUMN_WIDTH
) -> Any:
    """Plot the density of the filters' norms, with a tick for each norm (the paper's Figure 3).

    Args:
        layer: the layer's analysis.
        log: use a logarithmic axis.
        title: the layer's name by default.
        width: in points.
    """
    alt = load_altair()
    values = [math.log10(max(norm, _FLOOR)) if log else norm for norm in layer.norms]
    low, high = min(values), max(values)
    margin = 0.15 * (high - low) or 0.1
    ends = [low - margin if log else max(0.0, low - margin), high + margin]
    axis = alt.Axis(labelExpr="format(pow(10, datum.value), '.2~g')") if log else alt.Axis()
    x = alt.X(
        "norm:Q",
        scale=alt.Scale(domain=ends, nice=False),
        axis=axis,
        title="norm, logarithmic" if log else "norm",
    )
    base = alt.Chart(inline_data([{"norm": value} for value in values]))
    curve = (
        base.transform_density("norm", as_=["norm", "density"], extent=ends)
        .mark_line(color=KEPT)
        .encode(x=x, y=alt.Y("density:Q", title="density"))
    )
    rug = base.mark_tick(color=RUG, thickness=1, opacity=0.7).encode(
        x=x, y=alt.value(_HEIGHT - 6), size=alt.value(12)
    )
    chart = (curve + rug).properties(width=width, height=_HEIGHT)
    return apply_style(chart, layer.layer if title is None else title)


def filter_map(
    layer: LayerAnalysis,
    removed: Collection[int] = (),
    *,
    title: str | None = None,
    width: int = COLUMN_WIDTH,
) -> Any:
    """Plot filters in two dimensions; removed ones are crosses, the geometric median a diamond.

    Args:
        layer: the layer's analysis.
        removed: indices of the removed filters.
        title: the layer's name by default.
        width: in points.
    """
    alt = load_altair()
    rows: list[dict[str, Any]] = [
        {
            "x": point[0],
            "y": point[1],
            "filter": number,
            "norm": layer.norms[number],
            "distance to the median": layer.to_median[number],
            "kind": "removed" if number in removed else "kept",
        }
        for number, point in enumerate(layer.places)
    ]
    rows.append({"x": 0.0, "y": 0.0, "kind": "geometric median"})
    kinds = ["kept", "removed", "geometric median"]
    if not removed:
        kinds.remove("removed")
    limit = 1.1 * max((max(abs(x) for x in point) for point in layer.places), default=1.0) or 1.0
    scale = alt.Scale(domain=[-limit, limit], nice=False)
    colors = {"kept": KEPT, "removed": REMOVED, "geometric median": MEDIAN}
    shapes = {"kept": "circle", "removed": "cross", "geometric median": "diamond"}
    chart = (
        alt.Chart(inline_data(rows))
        .mark_point(filled=True, size=45, opacity=0.8)
        .encode(
            x=alt.X("x:Q", scale=scale, title="first direction"),
            y=alt.Y("y:Q", scale=scale, title="second direction"),
            color=alt.Color(
                "kind:N",
                sort=kinds,
                scale=alt.Scale(domain=kinds, range=[colors[k] for k in kinds]),
            ),
            shape=alt.Shape(
                "kind:N",
                sort=kinds,
                scale=alt.Scale(domain=kinds, range=[shapes[k] for k in kinds]),
            ),
            tooltip=["filter:Q", "norm:Q", "distance to the median:Q", "kind:N"],
        )
        .properties(width=width, height=width)
    )
    return apply_style(chart, layer.layer if title is None else title)
