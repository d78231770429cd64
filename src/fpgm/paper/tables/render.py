"""A table made again, as it is shown and written: Markdown, LaTeX and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fpgm.paper.tables.row_files import Results
from fpgm.paper.tables.table_schema import Row
from fpgm.utils.atomic_io import write_text, writing
from fpgm.utils.tables import latex, markdown

MISSING = "missing"
QUICK = (
    "At quick scale a row has a fraction of the paper's training, some on other data (see how): "
    "compare rows with each other, not with the paper."
)

Cells = tuple[str, ...]


def shown(results: Results, rows: Sequence[Row] | None = None) -> tuple[Cells, list[Cells]]:
    """All rows or some: for every column what is printed, what came here, and the difference."""
    table = results.table
    header = [*table.labels]
    for column in table.columns:
        header += [f"{column.name}, paper", "ours", "difference"]
    lines = []
    for row in table.rows if rows is None else rows:
        figures = results.figures(row)
        made = results.all(row).values()
        cells = [*row.labels]
        for column in table.columns:
            paper, ours = row.printed[column.key], figures.get(column.key, [])
            cells += [
                column.printed(paper, row.spread.get(column.key)),
                column.ours(ours) if ours else MISSING,
                column.difference(paper, ours),
            ]
        how = "; ".join(dict.fromkeys(own.how for own in made))
        taken = spent(mean(own.seconds for own in made)) if made else ""
        lines.append((*cells, str(len(made)), taken, how))
    return (*header, "seeds", "time", "how"), lines


def spent(seconds: float) -> str:
    """A time as people say it.

    >>> spent(8.4), spent(150), spent(11_520)
    ('8 s', '2.5 min', '3.2 h')
    """
    for unit, long in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * long:
            return f"{seconds / long:.1f} {unit}"
    return f"{seconds:.0f} s"


def written(results: Results, command: Callable[[Row], str | None]) -> list[Path]:
    """The table as Markdown, LaTeX and JSON, beside its rows; `command` makes one at full scale."""
    table = results.table
    header, lines = shown(results)
    left = len(table.labels)
    title = f"# {table.title} ({table.name}, {results.scale})\n\n"
    end = "" if results.scale == "full" else f"\n{QUICK}\n"
    whole = {
        "table": table.name,
        "scale": results.scale,
        "rows": [{**told(results, row), "command": command(row)} for row in table.rows],
    }
    texts = {
        ".md": title + markdown(header, lines, left) + "\n" + end,
        ".tex": latex(header, lines, left) + "\n",
        ".json": json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    }
    files = []
    for ending, text in texts.items():
        file = results.folder.with_suffix(ending)
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
        files.append(file)
    return files


def told(results: Results, row: Row) -> dict[str, Any]:
    """A row as plain values; a column without figures is None."""
    figures = results.figures(row)
    return {
        "row": row.key,
        "labels": list(row.labels),
        "printed": dict(row.printed),
        "printed_spread": dict(row.spread),
        "ours": {
            key: {"mean": mean(own), "spread": stdev(own) if len(own) > 1 else None}
            if (own := figures.get(key))
            else None
            for key in results.table.keys
        },
        "difference": {
            key: round(mean(own) - paper, 4)
            for key, own in figures.items()
            if (paper := row.printed[key]) is not None
        },
        "made": [
            {"seed": seed, "ours": dict(m.ours), "seconds": m.seconds, "how": m.how}
            for seed, m in results.all(row).items()
        ],
    }
