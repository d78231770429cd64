"""A folder of rows that were made again: each a file, so that several machines can fill it.

A row that is there is not made again; one that is not is shown as missing, never filled in.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpgm.errors import FileError
from fpgm.files import write_text, writing
from fpgm.reproduce.printed import Row, Table
from fpgm.tables import latex, markdown, mean_and_spread
from fpgm.wording import reason

MISSING = "missing"


@dataclass(frozen=True)
class Made:
    """What came of a row with one seed."""

    ours: Mapping[str, float | None]
    """By the table's columns, in the paper's units."""
    seconds: float
    how: str
    """In words: what was done at this scale."""


class Results:
    """Rows of one table at one scale."""

    def __init__(
        self, out: Path, table: Table, scale: str, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.table, self.scale = table, scale
        self.settings = None if settings is None else json.loads(json.dumps(dict(settings)))
        """What rows depend on besides; rows made with other ones are refused, if it is known."""
        self.folder = out / f"{table.name}-{scale}"

    def made(self, row: Row, seed: int) -> Made | None:
        """A row that is there."""
        file = self._file(row, seed)
        if not file.exists():
            return None
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            settings = told["settings"]
            ours = {str(key): _number(value) for key, value in told["ours"].items()}
            made = Made(ours, float(told["seconds"]), str(told["how"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{file} cannot be read: {reason(error)}.") from error
        if self.settings is not None and settings != self.settings:
            other = [key for key in self.settings if settings.get(key) != self.settings[key]]
            raise FileError(
                f"{file} was made with another {', '.join(other) or 'setting'}: choose another "
                "--out, or delete it."
            )
        return made

    def keep(self, row: Row, seed: int, made: Made, command: str) -> None:
        """Write a row."""
        file = self._file(row, seed)
        told = {
            "table": self.table.name, "row": row.key, "scale": self.scale, "seed": seed,
            "ours": dict(made.ours), "printed": dict(row.printed), "seconds": made.seconds,
            "how": made.how, "command": command, "settings": self.settings or {},
        }  # fmt: skip
        with writing(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(told, indent=1, allow_nan=False) + "\n")

    def seeds(self, row: Row) -> list[int]:
        """Seeds with which a row is there."""
        ends = (file.stem.rpartition(".")[2] for file in self.folder.glob(f"{row.key}.*.json"))
        return sorted(int(end) for end in ends if end.isdecimal())

    def all(self, row: Row) -> list[Made]:
        """A row with every seed there is."""
        return [made for seed in self.seeds(row) if (made := self.made(row, seed)) is not None]

    def shown(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The table: for every column what is printed, what came here, and the difference."""
        header = [*self.table.labels]
        for column in self.table.columns:
            header += [f"{column}, paper", "ours", "Δ"]
        lines = []
        for row in self.table.rows:
            made = self.all(row)
            cells = [*row.labels]
            for column in self.table.columns:
                known = [m.ours[column] for m in made if m.ours.get(column) is not None]
                cells += compared(row.printed.get(column), known)  # type: ignore[arg-type]
            seconds = f"{statistics.mean(m.seconds for m in made):.0f}" if made else ""
            how = "; ".join(dict.fromkeys(m.how for m in made))
            lines.append((*cells, str(len(made)), seconds, how))
        return (*header, "seeds", "seconds", "how"), lines

    def write(self) -> list[Path]:
        """The table as Markdown, LaTeX and JSON, beside the rows."""
        header, lines = self.shown()
        left = len(self.table.labels)
        title = f"# {self.table.title} ({self.table.name}, {self.scale})\n\n"
        rows = [
            {
                "row": row.key,
                "printed": dict(row.printed),
                "made": [
                    {
                        "seed": seed,
                        "ours": dict(m.ours),
                        "difference": _differences(row.printed, m.ours),
                        "seconds": m.seconds,
                        "how": m.how,
                    }
                    for seed, m in zip(self.seeds(row), self.all(row), strict=True)
                ]
                or None,
            }
            for row in self.table.rows
        ]
        texts = {
            ".md": title + markdown(header, lines, left) + "\n",
            ".tex": latex(header, lines, left) + "\n",
            ".json": json.dumps({"table": self.table.name, "rows": rows}, indent=1) + "\n",
        }
        files = []
        for ending, text in texts.items():
            file = self.folder.with_suffix(ending)
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, text)
            files.append(file)
        return files

    def _file(self, row: Row, seed: int) -> Path:
        return self.folder / f"{row.key}.{seed}.json"


def compared(printed: float | None, ours: Sequence[float]) -> list[str]:
    """Printed, ours with its spread, and the difference.

    >>> compared(91.0, [90.0, 92.0])
    ['91', '91.00 ± 1.41', '+0.00']
    >>> compared(None, []), compared(91.5, [])
    (['–', 'missing', ''], ['91.5', 'missing', ''])
    """
    paper = "–" if printed is None else f"{printed:g}"
    if not ours:
        return [paper, MISSING, ""]
    off = "" if printed is None else f"{statistics.mean(ours) - printed:+.2f}"
    return [paper, mean_and_spread(ours, ".2f"), off]


def _differences(
    printed: Mapping[str, float | None], ours: Mapping[str, float | None]
) -> dict[str, float]:
    """Ours less what is printed, where both are known."""
    return {
        column: round(own - paper, 4)
        for column, own in ours.items()
        if own is not None and (paper := printed.get(column)) is not None
    }


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a figure is not finite")
    return number
