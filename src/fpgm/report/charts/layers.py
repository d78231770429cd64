"""Figures of a plan: every group's units before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpgm.pruning.plan import Group
from fpgm.report.charts.style import COLUMN, GONE, KEPT, altair, data, ends, styled


def widths(
    groups: Sequence[Group],
    *,
    numbers: Sequence[int] | None = None,
    axis_on_top: bool = False,
    width: int = COLUMN,
) -> Any:
    """A bar for every group, from top to bottom: units that stay, then units that go.

    `numbers` says which of a plan's groups they are, counted from 0; all of them, by default.
    With the axis on top, and the legend, a long figure can be read from its beginning.
    """
    alt = altair()
    counted = range(len(groups)) if numbers is None else numbers
    names = [f"{number + 1}. {group.name}" for number, group in zip(counted, groups, strict=True)]
    rows = [
        {"group": name, "units": count, "kind": kind, "order": order}
        for name, group in zip(names, groups, strict=True)
        for order, (kind, count) in enumerate(
            (("kept", group.kept), ("removed", group.units - group.kept))
        )
    ]
    chart = (
        alt.Chart(data(rows))
        .mark_bar(stroke="white", strokeWidth=0.5)
        .encode(
            y=alt.Y(
                "group:N",
                sort=names,
                title=None,
                axis=alt.Axis(labelLimit=150, labelFontSize=9, labelExpr=ends(28)),
            ),
            x=alt.X(
                "units:Q",
                title="units",
                **({"axis": alt.Axis(orient="top")} if axis_on_top else {}),
            ),
            color=alt.Color(
                "kind:N",
                sort=["kept", "removed"],
                scale=alt.Scale(domain=["kept", "removed"], range=[KEPT, GONE]),
                **({"legend": alt.Legend(orient="top")} if axis_on_top else {}),
            ),
            order="order:Q",
            tooltip=["group:N", "kind:N", "units:Q"],
        )
        .properties(width=width, height=13 * len(groups))
    )
    return styled(chart)
