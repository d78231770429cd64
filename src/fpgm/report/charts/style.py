"""The common style of all charts: colors, dashes, fonts, axes.

The colors differ for color-blind readers and in greyscale.
"""

from __future__ import annotations

from typing import Any

from fpgm.errors import RequestError

KEPT, REMOVED, MEDIAN, GREY, RUG = "#0072b2", "#d55e00", "#000000", "#9a9a9a", "#009e73"
"""Okabe and Ito's colors: kept filters are blue, removed ones vermilion."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 1], [1, 3], [10, 4])
"""One dash pattern per color, so that lines differ without color too."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke")

COLUMN_WIDTH = 240
"""Width in points of one column of a two-column page."""


def load_altair() -> Any:
    """Import Altair, or say how to install it."""
    try:
        import altair
    except ImportError as error:
        raise RequestError('Charts need additional packages: pip install "fpgm[report]"') from error
    return altair


def apply_style(chart: Any, title: str | None = None) -> Any:
    """Set the chart's fonts, axes, legend and optional title."""
    if title:
        chart = chart.properties(title=title)
    return (
        chart.configure(font="Helvetica, Arial, sans-serif", background="white")
        .configure_axis(labelFontSize=10, titleFontSize=11, titleFontWeight="normal", grid=False)
        .configure_title(fontSize=12, anchor="start", fontWeight="normal")
        .configure_legend(labelFontSize=10, titleFontSize=10, orient="bottom", title=None)
        .configure_view(strokeOpacity=0)
        .configure_header(labelFontSize=10, titleFontSize=11)
    )


def shorten_label_expression(max_length: int) -> str:
    """Return the Vega expression that shortens a long label to its beginning and its end."""
    tail = max_length - 6
    return (
        f"length(datum.label) > {max_length} ? slice(datum.label, 0, 5) + '…' + "
        f"slice(datum.label, -{tail}) : datum.label"
    )


ROW_HEIGHT = 18
"""Points per name on an axis of names, so that every name is drawn."""


def name_axis() -> Any:
    """Create a vertical axis of names; long ones lose their middle."""
    return load_altair().Axis(
        labelLimit=190, labelOverlap=False, labelExpr=shorten_label_expression(28)
    )


def inline_data(rows: list[dict[str, Any]]) -> Any:
    """Embed all rows in the chart itself."""
    return load_altair().Data(values=rows)
