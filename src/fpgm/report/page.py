"""Render a run folder, or several, as one self-contained HTML page.

All data, styles and scripts are inside the page, so it opens without a network. Rendering reads
JSON only: no model is built, no model code runs, and text from files is escaped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources, util
from pathlib import Path, PurePath
from typing import Any

from fpgm._version import __version__
from fpgm.errors import RequestError
from fpgm.report.chart_data import Chart, run_charts
from fpgm.report.compare import comparison_values
from fpgm.report.headline import cards, summary
from fpgm.report.layers import (
    LayerRow,
    Stream,
    StringTable,
    layer_rows,
    layout_streams,
    row_data,
    truncate_middle,
)
from fpgm.report.records import StringMap
from fpgm.report.run import Run, read_run
from fpgm.report.settings import used_settings
from fpgm.report.speed import speeds
from fpgm.report.usage import snippets
from fpgm.utils.atomic_io import explain_write_errors, write_text
from fpgm.utils.plain_json import replace_non_finite
from fpgm.utils.run_files import REPORT

MAX_PAGE_BYTES = 3_000_000
"""Maximum size of a page. For larger networks details are omitted, and the page lists them."""
_MAX_SETTING_LENGTH = 1000
"""Characters shown of a setting's value."""
_MAX_SETTINGS = 200
_MAX_SPEEDS = 100
"""Rows in the table of measured times."""


def report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page about one run and return its path.

    Args:
        folder: a run folder of `fpgm prune` or `fpgm train`.
        out: the file to write; `report.html` in the folder by default.
    """
    run_folder = Path(folder)
    target = Path(out) if out is not None else run_folder / REPORT
    _write(target, render_page(read_run(run_folder)))
    return target


def compare(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page that compares several runs side by side, and return its path."""
    if len(folders) < 2:
        raise RequestError("There is nothing to compare: give at least two folders.")
    target = Path(out)
    _write(target, render_comparison([read_run(Path(folder)) for folder in folders]))
    return target


def render_page(run: Run, *, live: str | None = None) -> str:
    """Render the page about one run.

    Args:
        run: what was read from the run folder.
        live: the folder's version, if the page is served: it reloads when the version changes.
    """
    _check_packages()
    rows = layer_rows(run)
    lanes = layout_streams(run, rows)
    charts = run_charts(run, rows)
    values: dict[str, Any] = {
        "title": truncate_middle(run.model or run.name),
        "name": truncate_middle(run.name),
        "summary": truncate_middle(summary(run)),
        "untrained": run.results.untrained,
        "cards": cards(run),
        "snippets": snippets(run),
        "speeds": speeds(run)[:_MAX_SPEEDS],
        "notes": []
        if run.plan is None
        else [truncate_middle(n, _MAX_SETTING_LENGTH) for n in run.plan.notes[:20]],
        "has_frozen": any(row.frozen for row in rows),
        "in_run_order": run.analysis is not None,
        "command": truncate_middle(_command_line(run), 4 * _MAX_SETTING_LENGTH),
        "settings": _setting_pairs(used_settings(run)),
        "environment": _setting_pairs(run.results.versions or run.environment.others),
        "seconds": _setting_pairs(run.results.seconds),
    }
    text = ""
    for omitted, data, visible_charts in _reduced_contents(rows, lanes, charts):
        values |= {
            "omitted": omitted,
            "layers": len(data["layers"]),
            "lanes": len(data["streams"]),
            "charts": visible_charts,
        }
        text = _render("run.html", values, data, live)
        if len(text.encode()) <= MAX_PAGE_BYTES:
            break
    return text


def render_comparison(runs: Sequence[Run]) -> str:
    """Render the page that compares several runs."""
    _check_packages()
    values = comparison_values(runs)
    values["title"] = truncate_middle(" · ".join(values["names"]))
    text = _render("compare.html", {**values, "omitted": []}, {})
    if len(text.encode()) > MAX_PAGE_BYTES:
        text = _render("compare.html", {**values, "omitted": ["charts"], "charts": []}, {})
    return text


PageContents = tuple[list[str], dict[str, Any], list[Chart]]


def _reduced_contents(
    rows: Sequence[LayerRow], lanes: Sequence[Stream], charts: list[Chart]
) -> Iterator[PageContents]:
    """Yield the contents of a page with ever fewer details, and a list of what is omitted."""
    hidden = sum(stream.column < 0 for stream in lanes)
    message = f"{hidden} of {len(lanes)} streams, which do not fit beside the network"
    no_room = [message] if hidden else []
    for detail, omitted in ((2, []), (1, ["filter maps"]), (0, ["individual filters"])):
        yield [*no_room, *omitted], _page_data(rows, lanes, detail), charts
    count = len(rows)
    while count > 100:
        count //= 2
        layers = f"all but the first {count} of {len(rows)} layers"
        yield ["individual filters", "streams", layers], _page_data(rows[:count], [], 0), charts
    yield ["charts", "layers"], _page_data([], [], 0), []


def _page_data(rows: Sequence[LayerRow], lanes: Sequence[Stream], detail: int) -> dict[str, Any]:
    """Collect the data that the page's JavaScript builds the diagram and the table from."""
    strings = StringTable()
    layers = [row_data(row, strings, detail) for row in rows]
    visible = [
        {
            "name": truncate_middle(stream.name),
            "column": stream.column,
            "first": stream.first,
            "last": stream.last,
            "producers": stream.producers,
            "consumers": stream.consumers,
        }
        for stream in lanes
        if stream.column >= 0
    ]
    texts = [truncate_middle(text, 2000) for text in strings.strings]
    return {"layers": layers, "streams": visible, "strings": texts}


def _command_line(run: Run) -> str:
    """Return the command line of the run, ready to paste into a shell."""
    if run.results.command or not run.environment.command:
        return run.results.command
    program, *words = run.environment.command
    file = PurePath(program)
    start = ["python", "-m", file.parent.name] if file.name == "__main__.py" else [file.name]
    return shlex.join([*start, *words])


def _setting_pairs(value: StringMap) -> list[tuple[str, str]]:
    pairs = [
        (truncate_middle(key), truncate_middle(text, _MAX_SETTING_LENGTH))
        for key, text in value.items()
    ]
    return pairs[:_MAX_SETTINGS]


def _render(
    template: str, values: dict[str, Any], data: dict[str, Any], live: str | None = None
) -> str:
    text: str = (
        _templates()
        .get_template(template)
        .render(
            **values,
            version=__version__,
            live=live,
            data=_escape_json({**data, "specs": [chart.spec for chart in values["charts"]]}),
            style=_read_asset("page.css"),
            script=_read_asset("page.js"),
            vega=_vega_bundle(),
        )
    )
    return text.encode("utf-8", "replace").decode()  # JSON may hold unpaired surrogates


_MISSING_PACKAGES = 'The report needs more packages: pip install "fpgm[report]"'


def _check_packages() -> None:
    """Refuse before anything is computed; charts would name themselves, not the report."""
    if any(util.find_spec(name) is None for name in ("altair", "jinja2", "vl_convert")):
        raise RequestError(_MISSING_PACKAGES)


@cache
def _templates() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise RequestError(_MISSING_PACKAGES) from error
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_asset), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


@cache
def _vega_bundle() -> str:
    """Return the JavaScript of Vega-Lite; building the bundle takes 1.5 seconds."""
    try:
        import vl_convert
    except ImportError as error:
        raise RequestError(_MISSING_PACKAGES) from error
    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub has no default
    return bundle.replace("</script", "<\\/script")


def _read_asset(name: str) -> str:
    return (resources.files("fpgm.report") / name).read_text(encoding="utf-8")


def _escape_json(value: Any) -> str:
    """Serialize to JSON that is safe inside a script element."""
    text = json.dumps(replace_non_finite(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _write(target: Path, text: str) -> None:
    with explain_write_errors(target):
        write_text(target, text)
