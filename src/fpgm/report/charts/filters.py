"""Figures of one layer's filters: how their norms lie, and how they lie around their median."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from fpgm.report.analysis.result import LayerAnalysis
from fpgm.report.charts.style import COLUMN, GONE, KEPT, MIDDLE, RUG, altair, data, styled

_HEIGHT = 150
_FLOOR = 1e-8
"""Norms of nothing are drawn here where the scale has no zero."""


def norm_distribution(
    layer: LayerAnalysis, *, log: bool = False, title: str | None = None, width: int = COLUMN
) -> Any:
    """The paper's Figure 3: every norm as a stroke, their density as a curve."""
    alt = altair()
    places = [math.log10(max(norm, _FLOOR)) if log else norm for norm in layer.norms]
    low, high = min(places), max(places)
    margin = 0.15 * (high - low) or 0.1
    ends = [low - margin if log else max(0.0, low - margin), high + margin]
    axis = alt.Axis(labelExpr="format(pow(10, datum.value), '.2~g')") if log else alt.Axis()
    x = alt.X(
        "norm:Q",
        scale=alt.Scale(domain=ends, nice=False),
        axis=axis,
        title="norm, logarithmic" if log else "norm",
    )
    known = alt.Chart(data([{"norm": place} for place in places]))
    curve = (
        known.transform_density("norm", as_=["norm", "density"], extent=ends)
        .mark_line(color=KEPT)
        .encode(x=x, y=alt.Y("density:Q", title="density"))
    )
    rug = known.mark_tick(color=RUG, thickness=1, opacity=0.7).encode(
        x=x, y=alt.value(_HEIGHT - 6), size=alt.value(12)
    )
    chart = (curve + rug).properties(width=width, height=_HEIGHT)
    return styled(chart, layer.layer if title is None else title)


def filter_map(
    layer: LayerAnalysis,
    removed: Collection[int] = (),
    *,
    title: str | None = None,
    width: int = COLUMN,
) -> Any:
    """Filters on a plane, those that go as crosses, their geometric median as a diamond."""
    alt = altair()
    rows: list[dict[str, Any]] = [
        {
            "x": place[0],
            "y": place[1],
            "filter": number,
            "norm": layer.norms[number],
            "distance to the median": layer.to_median[number],
            "kind": "removed" if number in removed else "kept",
        }
        for number, place in enumerate(layer.places)
    ]
    rows.append({"x": 0.0, "y": 0.0, "kind": "geometric median"})
    kinds = ["kept", "removed", "geometric median"]
    if not removed:
        kinds.remove("removed")
    reach = 1.1 * max((max(abs(x) for x in place) for place in layer.places), default=1.0) or 1.0
    scale = alt.Scale(domain=[-reach, reach], nice=False)
    colours = {"kept": KEPT, "removed": GONE, "geometric median": MIDDLE}
    shapes = {"kept": "circle", "removed": "cross", "geometric median": "diamond"}
    chart = (
        alt.Chart(data(rows))
        .mark_point(filled=True, size=45, opacity=0.8)
        .encode(
            x=alt.X("x:Q", scale=scale, title="first direction"),
            y=alt.Y("y:Q", scale=scale, title="second direction"),
            color=alt.Color(
                "kind:N",
                sort=kinds,
                scale=alt.Scale(domain=kinds, range=[colours[k] for k in kinds]),
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
    return styled(chart, layer.layer if title is None else title)
