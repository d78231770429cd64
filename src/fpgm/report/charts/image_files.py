"""Write charts as PNG, SVG or PDF."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from fpgm.errors import RequestError
from fpgm.report.analysis.result import Analysis
from fpgm.report.charts.filters import filter_map, norm_distribution
from fpgm.utils.atomic_io import atomic_write_stream, create_folder, explain_write_errors, temp_dir
from fpgm.utils.progress import Progress

FORMATS = ("png", "svg", "pdf")
_SCALE = 3
"""Pixels per point in PNG files."""


def check_format(name: str) -> None:
    """Raise a `RequestError` for a format that cannot be written."""
    if name not in FORMATS:
        raise RequestError(f"Unknown image format {name!r}: give one of {', '.join(FORMATS)}.")


def save(figure: Any, path: str | Path) -> None:
    """Write a chart; the suffix of the path selects PNG, SVG or PDF."""
    target = Path(path)
    kind = target.suffix.lstrip(".").lower()
    check_format(kind)
    content = _render(figure, kind)
    with explain_write_errors(target):
        atomic_write_stream(target, lambda out: out.write(content))


def _render(figure: Any, kind: str) -> bytes:
    stream = io.StringIO() if kind == "svg" else io.BytesIO()
    figure.save(stream, format=kind, scale_factor=_SCALE if kind == "png" else 1)
    content = stream.getvalue()
    return content.encode() if isinstance(content, str) else content


def save_analysis(
    analysis: Analysis, folder: Path, kind: str, progress: Progress | None = None
) -> None:
    """Write three charts per layer: norms, norms on a logarithmic axis, and the filter map.

    The files appear in the folder only after all of them were written.
    """
    check_format(kind)
    with explain_write_errors(folder), create_folder(folder), temp_dir(folder, "figures") as part:
        new = part / "new"
        new.mkdir()
        for number, layer in enumerate(analysis.layers):
            if progress is not None:
                progress(layer.layer, number, len(analysis.layers))
            name = re.sub(r"[^\w.-]", "_", layer.layer) or "model"
            for kind_of_chart, figure in (
                ("norms", norm_distribution(layer)),
                ("norms-log", norm_distribution(layer, log=True)),
                ("map", filter_map(layer)),
            ):
                (new / f"{name}.{kind_of_chart}.{kind}").write_bytes(_render(figure, kind))
        for file in sorted(new.iterdir()):
            file.replace(folder / file.name)
