"""`report`: one page about a run that opens anywhere, made from the JSON in its folder.

Everything is inside the file: nothing is fetched when it is opened. No model is built, no torch is
imported, and every text that comes from a model or a file is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fpgm.errors import RequestError
from fpgm.files import write_text, writing
from fpgm.report.charts import charts
from fpgm.report.compare import comparison
from fpgm.report.headline import cards
from fpgm.report.layers import layer_rows, table_row
from fpgm.report.run import Run, read_run

LARGEST = 3_000_000
"""Bytes of a page; a larger network is shown without its single filters."""


def report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page about one run; by default into its folder. Returns where it is."""
    place = Path(folder)
    target = Path(out) if out is not None else place / "report.html"
    _write(target, page(read_run(place)))
    return target


def compare(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page that sets several runs side by side."""
    if len(folders) < 2:
        raise RequestError("There is nothing to compare: give two folders or more.")
    target = Path(out)
    _write(target, compare_page([read_run(Path(folder)) for folder in folders]))
    return target


def page(run: Run, *, live: bool = False) -> str:
    """The page about one run; a live one asks for itself again when the folder changes."""
    rows = layer_rows(run)
    shown = [table_row(row) for row in rows]
    values: dict[str, Any] = {
        "title": str(run.results.get("model") or (run.recipe or {}).get("name") or run.name),
        "run": run,
        "cards": cards(run),
        "rows": rows,
        "widest": max((row.filters for row in rows), default=1) or 1,
        "columns": 1 + max((lane["column"] for row in rows for lane in row.lanes), default=-1),
        "charts": charts(run, rows),
        "asked": _pairs(run.results.get("asked") or (run.recipe or {})),
        "environment": _pairs(run.results.get("versions") or run.environment or {}),
        "seconds": _pairs(run.results.get("seconds") or {}),
        "live": live,
    }
    text = _render("run.html", values, shown)
    if len(text.encode()) > LARGEST:
        small = [{**row, "norms": None, "to_median": None, "places": None} for row in shown]
        text = _render("run.html", values, small)
    return text


def compare_page(runs: Sequence[Run]) -> str:
    """The page about several."""
    values = {
        "title": " · ".join(run.name for run in runs),
        "live": False,
        **comparison(runs),
    }
    return _render("compare.html", values, [])


def _render(template: str, values: dict[str, Any], layers: Sequence[Any]) -> str:
    try:
        import jinja2
        import vl_convert
    except ImportError as error:
        raise RequestError(
            "A report needs more packages: pip install altair jinja2 vl-convert-python."
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub has no default
    specs = [chart.spec for chart in values["charts"]]
    return environment.get_template(template).render(
        **values,
        specs=_embedded(specs),
        layers=_embedded(layers),
        style=_asset("page.css"),
        script=_asset("page.js"),
        vega=bundle.replace("</script", "<\\/script"),
    )


def _asset(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _embedded(value: Any) -> str:
    """JSON that may stand in a page: nothing in it ends a script or begins one."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _pairs(value: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (str(key), own if isinstance(own, str) else json.dumps(own, ensure_ascii=False))
        for key, own in value.items()
    ]


def _write(target: Path, text: str) -> None:
    with writing(target):
        write_text(target, text)
