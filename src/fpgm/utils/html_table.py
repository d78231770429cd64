"""Small HTML tables for notebooks; every text in them is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MAX_ROWS = 50
"""Maximum rows shown; the others are only counted."""


def html_table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
) -> str:
    """Return a table with a caption above it and notes below it.

    >>> html_table("a & b", [], [["<i>"]], ["done"])
    '<table><caption>a &amp; b</caption><tr><td>&lt;i&gt;</td></tr></table><p>done</p>'
    """
    shown = list(rows[:MAX_ROWS])
    lines = [_row("th", header)] if header else []
    lines += [_row("td", row) for row in shown]
    if len(rows) > len(shown):
        lines.append(_row("td", [f"… and {len(rows) - len(shown)} more"]))
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>{below}"


def _row(tag: str, cells: Sequence[str]) -> str:
    inside = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"
