"""`report`: one page about a run that opens anywhere, made from the JSON in its folder.

Everything is inside the file: nothing is fetched when it is opened. No model is built and no code
of a model is run, and every text that comes from a file is escaped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

from fpgm._version import __version__
from fpgm.errors import RequestError
from fpgm.report.chart_data import Chart, charts
from fpgm.report.compare import comparison
from fpgm.report.headline import cards
from fpgm.report.layers import LayerRow, Phrases, Stream, clip, embedded_row, layer_rows, streams
from fpgm.report.records import Texts
from fpgm.report.run import Run, read_run
from fpgm.utils.atomic_io import write_text, writing
from fpgm.utils.plain_json import finite

LARGEST = 3_000_000
"""Bytes of a page: of a larger network less is shown, and the page says what."""
_LONGEST = 1000
"""Letters of a setting."""
_MOST_SETTINGS = 200


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


def page(run: Run, *, live: str | None = None) -> str:
    """The page about one run; a live one loads itself again when its folder's version changes."""
    rows = layer_rows(run)
    lanes = streams(run, rows)
    drawn = charts(run, rows)
    values: dict[str, Any] = {
        "title": clip(run.model or run.name),
        "name": clip(run.name),
        "cards": cards(run),
        "notes": [] if run.plan is None else [clip(n, _LONGEST) for n in run.plan.notes[:20]],
        "ordered": run.analysis is not None,
        "command": clip(_command(run), 4 * _LONGEST),
        "asked": _pairs(run.asked),
        "environment": _pairs(run.results.versions or run.environment.others),
        "seconds": _pairs(run.results.seconds),
    }
    text = ""
    for left_out, data, shown in _smaller_and_smaller(rows, lanes, drawn):
        values |= {
            "left_out": left_out,
            "layers": len(data["layers"]),
            "lanes": len(data["streams"]),
            "charts": shown,
        }
        text = _render("run.html", values, data, live)
        if len(text.encode()) <= LARGEST:
            break
    return text


def compare_page(runs: Sequence[Run]) -> str:
    """The page about several."""
    values = comparison(runs)
    values["title"] = clip(" · ".join(values["names"]))
    text = _render("compare.html", {**values, "left_out": []}, {})
    if len(text.encode()) > LARGEST:
        text = _render("compare.html", {**values, "left_out": ["charts"], "charts": []}, {})
    return text


Smaller = tuple[list[str], dict[str, Any], list[Chart]]


def _smaller_and_smaller(
    rows: Sequence[LayerRow], lanes: Sequence[Stream], drawn: list[Chart]
) -> Iterator[Smaller]:
    """What a page may hold, each time with less, and what was left out, in words."""
    hidden = sum(stream.column < 0 for stream in lanes)
    told = f"{hidden} of {len(lanes)} streams, for which there is no room beside the network"
    crowded = [told] if hidden else []
    for detail, words in ((2, []), (1, ["the maps of filters"]), (0, ["all single filters"])):
        yield [*crowded, *words], _data(rows, lanes, detail), drawn
    count = len(rows)
    while count > 100:
        count //= 2
        layers = f"all but the first {count} of {len(rows)} layers"
        yield ["all single filters", "streams", layers], _data(rows[:count], [], 0), drawn
    yield ["charts", "layers"], _data([], [], 0), []


def _data(rows: Sequence[LayerRow], lanes: Sequence[Stream], detail: int) -> dict[str, Any]:
    """What the page's own code makes its rows of."""
    phrases = Phrases()
    layers = [embedded_row(row, phrases, detail) for row in rows]
    placed = [
        {
            "name": clip(own.name),
            "column": own.column,
            "first": own.first,
            "last": own.last,
            "writes": own.writes,
            "reads": own.reads,
        }
        for own in lanes
        if own.column >= 0
    ]
    return {"layers": layers, "streams": placed, "phrases": [clip(t, 2000) for t in phrases.all]}


def _command(run: Run) -> str:
    """The command to be run again; a training has it as a list of words."""
    if run.results.command or not run.environment.command:
        return run.results.command
    program, *words = run.environment.command
    file = PurePath(program)
    start = ["python", "-m", file.parent.name] if file.name == "__main__.py" else [file.name]
    return shlex.join([*start, *words])


def _pairs(value: Texts) -> list[tuple[str, str]]:
    pairs = [(clip(key), clip(own, _LONGEST)) for key, own in value.items()]
    return pairs[:_MOST_SETTINGS]


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
            data=_embedded({**data, "specs": [chart.spec for chart in values["charts"]]}),
            style=_asset("page.css"),
            script=_asset("page.js"),
            vega=_vega(),
        )
    )
    return text.encode("utf-8", "replace").decode()  # JSON may hold halves of letters


_NEEDED = 'A report needs more packages: pip install "fpgm[report]"'


@cache
def _templates() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise RequestError(_NEEDED) from error
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


@cache
def _vega() -> str:
    """The library that draws in the browser: a second and a half to make."""
    try:
        import vl_convert
    except ImportError as error:
        raise RequestError(_NEEDED) from error
    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub has no default
    return bundle.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return (resources.files("fpgm.report") / name).read_text(encoding="utf-8")


def _embedded(value: Any) -> str:
    """JSON that may stand in a page: nothing in it ends a script or begins one."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _write(target: Path, text: str) -> None:
    with writing(target):
        write_text(target, text)
