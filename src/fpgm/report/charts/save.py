"""Figures as files: PNG, SVG or PDF."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from fpgm.errors import RequestError
from fpgm.report.analysis.result import Analysis
from fpgm.report.charts.filters import filter_map, norm_distribution
from fpgm.utils.atomic_io import aside, made, write_whole, writing
from fpgm.utils.progress import Progress

FORMATS = ("png", "svg", "pdf")
_SCALE = 3
"""Pixels a point, in PNG."""


def check_format(name: str) -> None:
    """Refuse what cannot be written."""
    if name not in FORMATS:
        raise RequestError(f"A figure cannot be {name!r}: give one of {', '.join(FORMATS)}.")


def save(figure: Any, path: str | Path) -> None:
    """Write a figure; the name's ending says as what."""
    target = Path(path)
    kind = target.suffix.lstrip(".").lower()
    check_format(kind)
    content = _drawn(figure, kind)
    with writing(target):
        write_whole(target, lambda out: out.write(content))


def _drawn(figure: Any, kind: str) -> bytes:
    stream = io.StringIO() if kind == "svg" else io.BytesIO()
    figure.save(stream, format=kind, scale_factor=_SCALE if kind == "png" else 1)
    told = stream.getvalue()
    return told.encode() if isinstance(told, str) else told


def save_analysis(
    found: Analysis, folder: Path, kind: str, progress: Progress | None = None
) -> None:
    """Norms of every layer, linear and logarithmic, and its map of filters; all of them or none."""
    check_format(kind)
    with writing(folder), made(folder), aside(folder, "figures") as part:
        for number, layer in enumerate(found.layers):
            if progress is not None:
                progress(layer.layer, number, len(found.layers))
            name = re.sub(r"[^\w.-]", "_", layer.layer) or "model"
            for about, figure in (
                ("norms", norm_distribution(layer)),
                ("norms-log", norm_distribution(layer, log=True)),
                ("map", filter_map(layer)),
            ):
                (part / f"{name}.{about}.{kind}").write_bytes(_drawn(figure, kind))
        for file in sorted(part.iterdir()):
            file.replace(folder / file.name)
