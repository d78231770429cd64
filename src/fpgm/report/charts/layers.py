"""Bar chart of a plan: the kept and removed units of every group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpgm.pruning.plan import Group
from fpgm.report.charts.style import (
    COLUMN_WIDTH,
    KEPT,
    REMOVED,
    apply_style,
    inline_data,
    load_altair,
    shorten_label_expression,
)


def group_widths(groups: Sequence[Group], *, width: int = COLUMN_WIDTH) -> Any:
    """Plot a bar of kept and removed units for every group, from top to bottom.

    Args:
        groups: groups of a plan.
        width: in points.
    """
    alt = load_altair()
    names = [f"{number + 1}. {group.name}" for number, group in enumerate(groups)]
    rows = [
        {"group": name, "units": count, "kind": kind, "order": order}
        for name, group in zip(names, groups, strict=True)
        for order, (kind, count) in enumerate(
            (("kept", group.kept), ("removed", group.units - group.kept))
        )
    ]
    chart = (
        alt.Chart(inline_data(rows))
        .mark_bar(stroke="white", strokeWidth=0.5)
        .encode(
            y=alt.Y(
                "group:N",
                sort=names,
                title=None,
                axis=alt.Axis(
                    labelLimit=150, labelFontSize=9, labelExpr=shorten_label_expression(28)
                ),
            ),
            x=alt.X("units:Q", title="units"),
            color=alt.Color(
                "kind:N",
                sort=["kept", "removed"],
                scale=alt.Scale(domain=["kept", "removed"], range=[KEPT, REMOVED]),
            ),
            order="order:Q",
            tooltip=["group:N", "kind:N", "units:Q"],
        )
        .properties(width=width, height=13 * len(groups))
    )
    return apply_style(chart)
