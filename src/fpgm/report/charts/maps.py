"""Feature maps of a layer as small images, with removed channels marked (the paper's Figure 5)."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fpgm.errors import RequestError
from fpgm.report.charts.style import REMOVED, apply_style, inline_data, load_altair

Maps = npt.NDArray[np.floating[Any]]

_SIDE, _GAP = 40, 6


def feature_maps(
    maps: Maps, removed: Collection[int] = (), *, columns: int = 8, title: str | None = None
) -> Any:
    """Show all channels of a layer; removed ones have a colored frame.

    Args:
        maps: the layer's output for one input, [channels, height, width].
        removed: indices of the removed channels.
        columns: images per line.
        title: above the chart.
    """
    rows = [
        {"x": n % columns, "y": n // columns, "channel": n, "removed": n in removed}
        for n in range(len(maps))
    ]
    return apply_style(_grid(maps, rows, columns, -(-len(maps) // columns)), title)


def similar_maps(
    maps: Maps, pairs: Sequence[tuple[int, int, float]], *, title: str | None = None
) -> Any:
    """Show each removed channel above the kept channel that is most similar to it.

    Args:
        maps: the layer's output for one input, [channels, height, width].
        pairs: (removed, kept, correlation) each.
        title: above the chart.
    """
    rows: list[dict[str, Any]] = []
    for column, (removed, kept, correlation) in enumerate(pairs):
        rows.append({"x": column, "y": 0, "channel": removed, "removed": True})
        rows.append(
            {"x": column, "y": 1, "channel": kept, "removed": False, "note": f"{correlation:.2f}"}
        )
    return apply_style(_grid(maps, rows, len(pairs), 2), title)


def _grid(maps: Maps, rows: list[dict[str, Any]], columns: int, lines: int) -> Any:
    alt = load_altair()
    step = _SIDE + _GAP
    for row in rows:
        row["image"] = _png_data_url(maps[row["channel"]])
        row["label"] = f"{row['channel']}" + (f" ({row['note']})" if "note" in row else "")
        row["x"], row["y"] = row["x"] * step + step / 2, row["y"] * (step + 10) + step / 2
    chart_width, chart_height = columns * step, lines * (step + 10)
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, chart_width], nice=False, zero=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[chart_height, 0], nice=False, zero=False))
    base = alt.Chart(inline_data(rows)).encode(x=x, y=y)
    images = base.mark_image(width=_SIDE, height=_SIDE).encode(url="image:N")
    frames = base.transform_filter("datum.removed").mark_point(
        shape="square", size=(_SIDE + 2) ** 2, stroke=REMOVED, strokeWidth=2.5, fill=None, opacity=1
    )
    labels = base.mark_text(fontSize=8, dy=_SIDE / 2 + 7).encode(text="label:N")
    return (images + frames + labels).properties(width=chart_width, height=chart_height)


def _png_data_url(channel: Maps) -> str:
    """Encode one channel as a greyscale PNG in a data URL."""
    try:
        from PIL import Image
    except ImportError as error:
        message = 'Images of channels need Pillow: pip install "fpgm[report]"'
        raise RequestError(message) from error
    low, high = float(channel.min()), float(channel.max())
    grey = (channel - low) / (high - low or 1.0)
    stream = io.BytesIO()
    Image.fromarray((255 * grey).astype(np.uint8)).save(stream, format="PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
