"""How all figures look: colours that differ for everyone and in grey, letters that print."""

from __future__ import annotations

from typing import Any

from fpgm.errors import RequestError

KEPT, GONE, MIDDLE, QUIET, RUG = "#0072b2", "#d55e00", "#000000", "#9a9a9a", "#009e73"
"""Of Okabe and Ito's colours: blue stays, vermilion goes; they differ in lightness too."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 1], [1, 3], [10, 4])
"""A dash for every colour, so that lines are told apart without it."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke")

COLUMN = 240
"""Points across one column of a two-column page."""


def altair() -> Any:
    """The library that draws, if it is there."""
    try:
        import altair as found
    except ImportError as error:
        raise RequestError('Figures need more packages: pip install "fpgm[report]"') from error
    return found


def styled(chart: Any, title: str | None = None) -> Any:
    """A chart with our letters and lines."""
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


def ends(most: int) -> str:
    """How Vega writes a long name: with its beginning and its end, by which names differ."""
    tail = most - 6
    return (
        f"length(datum.label) > {most} ? slice(datum.label, 0, 5) + '…' + "
        f"slice(datum.label, -{tail}) : datum.label"
    )


def names_axis() -> Any:
    """An axis of names too long to stand side by side."""
    return altair().Axis(
        labelAngle=-60, labelLimit=110, labelOverlap="greedy", labelExpr=ends(18), labelFontSize=9
    )


def data(rows: list[dict[str, Any]]) -> Any:
    """Rows as the library takes them, whole: there is no server to ask for more."""
    return altair().Data(values=rows)
