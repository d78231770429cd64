"""The paper's Figure 5: what a layer shows of one picture, and which channels of it go.

With the channels that go stand the kept ones that resemble them most.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fpgm.errors import RequestError
from fpgm.report.charts.style import GONE, altair, data, styled

Maps = npt.NDArray[np.floating[Any]]

_SIDE, _GAP = 40, 6


def feature_maps(
    maps: Maps, removed: Collection[int] = (), *, columns: int = 8, title: str | None = None
) -> Any:
    """All channels [n, height, width] of a layer; those that go are framed in red and crossed."""
    rows = [
        {"x": n % columns, "y": n // columns, "channel": n, "gone": n in removed}
        for n in range(len(maps))
    ]
    return styled(_grid(maps, rows, columns, -(-len(maps) // columns)), title)


def replaced_maps(
    maps: Maps, pairs: Sequence[tuple[int, int, float]], *, title: str | None = None
) -> Any:
    """Channels that go above the kept ones most like them: (removed, kept, correlation) each."""
    rows: list[dict[str, Any]] = []
    for place, (gone, kept, alike) in enumerate(pairs):
        rows.append({"x": place, "y": 0, "channel": gone, "gone": True})
        rows.append({"x": place, "y": 1, "channel": kept, "gone": False, "told": f"{alike:.2f}"})
    return styled(_grid(maps, rows, len(pairs), 2), title)


def _grid(maps: Maps, rows: list[dict[str, Any]], columns: int, lines: int) -> Any:
    alt = altair()
    step = _SIDE + _GAP
    for row in rows:
        row["picture"] = _picture(maps[row["channel"]])
        row["label"] = f"{row['channel']}" + (f" ({row['told']})" if "told" in row else "")
        row["x"], row["y"] = row["x"] * step + step / 2, row["y"] * (step + 10) + step / 2
    wide, high = columns * step, lines * (step + 10)
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, wide], nice=False, zero=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[high, 0], nice=False, zero=False))
    base = alt.Chart(data(rows)).encode(x=x, y=y)
    pictures = base.mark_image(width=_SIDE, height=_SIDE).encode(url="picture:N")
    framed = base.transform_filter("datum.gone").mark_point(
        shape="square", size=(_SIDE + 2) ** 2, stroke=GONE, strokeWidth=2.5, fill=None, opacity=1
    )
    labels = base.mark_text(fontSize=8, dy=_SIDE / 2 + 7).encode(text="label:N")
    return (pictures + framed + labels).properties(width=wide, height=high)


def _picture(channel: Maps) -> str:
    """One channel as a grey picture inside a text."""
    try:
        from PIL import Image
    except ImportError as error:
        told = 'Pictures of channels need Pillow: pip install "fpgm[report]"'
        raise RequestError(told) from error
    low, high = float(channel.min()), float(channel.max())
    grey = (channel - low) / (high - low or 1.0)
    stream = io.BytesIO()
    Image.fromarray((255 * grey).astype(np.uint8)).save(stream, format="PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
