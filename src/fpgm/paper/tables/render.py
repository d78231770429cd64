"""Format a reproduced table for the terminal and write it as Markdown, LaTeX and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fpgm.paper.tables.row_files import RowStore
from fpgm.paper.tables.table_schema import TableRow
from fpgm.utils.atomic_io import explain_write_errors, write_text
from fpgm.utils.tables import latex_table, markdown_table

MISSING = "missing"
QUICK_NOTE = (
    "At quick scale a row has a fraction of the paper's training, and some use other data (see the "
    "column how): compare rows with each other, not with the paper."
)

Cells = tuple[str, ...]


def table_cells(
    results: RowStore, rows: Sequence[TableRow] | None = None
) -> tuple[Cells, list[Cells]]:
    """Format rows as text cells: for each column the paper's value, ours, and the difference.

    Args:
        results: the table and its results.
        rows: the rows to show; all by default.
    """
    table = results.table
    header = [*table.labels]
    for column in table.columns:
        header += [f"{column.name}, paper", "ours", "difference"]
    lines = []
    for row in table.rows if rows is None else rows:
        metrics = results.metrics(row)
        loaded_results = results.load_all(row).values()
        cells = [*row.labels]
        for column in table.columns:
            paper, ours = row.paper[column.key], metrics.get(column.key, [])
            cells += [
                column.format_paper(paper, row.spread.get(column.key)),
                column.format_ours(ours) if ours else MISSING,
                column.format_difference(paper, ours),
            ]
        how = "; ".join(dict.fromkeys(result.how for result in loaded_results))
        duration = (
            format_duration(mean(result.seconds for result in loaded_results))
            if loaded_results
            else ""
        )
        lines.append((*cells, str(len(loaded_results)), duration, how))
    return (*header, "seeds", "time", "how"), lines


def format_duration(seconds: float) -> str:
    """Format a duration.

    >>> format_duration(8.4), format_duration(150), format_duration(11_520)
    ('8 s', '2.5 min', '3.2 h')
    """
    for unit, long in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * long:
            return f"{seconds / long:.1f} {unit}"
    return f"{seconds:.0f} s"


def write_table(results: RowStore, command: Callable[[TableRow], str | None]) -> list[Path]:
    """Write the table as Markdown, LaTeX and JSON next to its rows, and return the files.

    Args:
        results: the table and its results.
        command: returns the command that reproduces a row at full scale.
    """
    table = results.table
    header, lines = table_cells(results)
    label_count = len(table.labels)
    title = f"# {table.title} ({table.name}, {results.scale})\n\n"
    end = "" if results.scale == "full" else f"\n{QUICK_NOTE}\n"
    document = {
        "table": table.name,
        "scale": results.scale,
        "rows": [{**row_to_dict(results, row), "command": command(row)} for row in table.rows],
    }
    texts = {
        ".md": title + markdown_table(header, lines, label_count) + "\n" + end,
        ".tex": latex_table(header, lines, label_count) + "\n",
        ".json": json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    }
    files = []
    for ending, text in texts.items():
        file = results.folder.with_suffix(ending)
        with explain_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
        files.append(file)
    return files


def row_to_dict(results: RowStore, row: TableRow) -> dict[str, Any]:
    """Convert a row to plain values for JSON; a column without values is None."""
    metrics = results.metrics(row)
    return {
        "row": row.key,
        "labels": list(row.labels),
        "printed": dict(row.paper),
        "printed_spread": dict(row.spread),
        "ours": {
            key: {"mean": mean(values), "spread": stdev(values) if len(values) > 1 else None}
            if (values := metrics.get(key))
            else None
            for key in results.table.keys
        },
        "difference": {
            key: round(mean(values) - paper, 4)
            for key, values in metrics.items()
            if (paper := row.paper[key]) is not None
        },
        "made": [
            {"seed": seed, "ours": dict(result.ours), "seconds": result.seconds, "how": result.how}
            for seed, result in results.load_all(row).items()
        ],
    }
