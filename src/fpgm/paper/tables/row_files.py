"""A folder of rows that were made again: each a file, so that several machines can fill it.

A row that is there is not made again; one that is not is shown as missing, never filled in.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from fpgm.errors import FileError
from fpgm.paper.tables.paper_tables import BASELINES, baseline_of
from fpgm.paper.tables.table_schema import Row, Table
from fpgm.utils.atomic_io import locked, write_text, writing
from fpgm.utils.text import reason

Settings = Callable[[Row, int], Mapping[str, Any]]
"""What a row depends on besides itself, by seed."""
WEIGHTS = "weights"
"""Of the settings, the digest of the weights a row starts from; None where they are not at hand."""


@dataclass(frozen=True)
class Made:
    """What came of a row with one seed."""

    ours: Mapping[str, float | None]
    """By the table's columns, in the paper's units."""
    seconds: float
    how: str
    """In words: what was done at this scale."""


class Results:
    """Rows of one table at one scale; those made with other `settings` are refused, if given."""

    def __init__(
        self, out: Path, table: Table, scale: str, settings: Settings | None = None
    ) -> None:
        self.table, self.scale = table, scale
        self.folder = out / f"{table.name}-{scale}"
        self._settings = settings
        self.baselines: Results | None = None
        """Where networks that are not pruned are kept, for tables that compare with them."""
        if any(own.before is not None for own in table.accuracies):
            self.baselines = Results(out, BASELINES, scale, settings)

    def made(self, row: Row, seed: int) -> Made | None:
        """A row that is there."""
        file = self._file(row, seed)
        if not file.exists():
            return None
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            settings = dict(told["settings"])
            ours = {str(key): _number(value) for key, value in told["ours"].items()}
            made = Made(ours, float(told["seconds"]), str(told["how"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{file} cannot be read: {reason(error)}.") from error
        now = self._known(row, seed)
        if self._settings is not None and _differ(settings, now):
            other = [key for key in now if key in _differ(settings, now)] or ["setting"]
            raise FileError(
                f"{file} was made with another {', '.join(other)}: choose another --out, or "
                "delete it."
            )
        return made

    def check(self) -> None:
        """Refuse a folder with rows that were made otherwise, before anything long is done."""
        for row in self.table.rows:
            self.all(row)
        if self.baselines is not None:
            self.baselines.check()

    def keep(self, row: Row, seed: int, made: Made, command: str) -> None:
        """Write a row."""
        file = self._file(row, seed)
        told = {
            "table": self.table.name, "row": row.key, "scale": self.scale, "seed": seed,
            "ours": dict(made.ours), "printed": dict(row.printed), "seconds": made.seconds,
            "how": made.how, "command": command, "settings": self._known(row, seed),
        }  # fmt: skip
        with writing(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(told, indent=1, allow_nan=False) + "\n")

    @contextmanager
    def claimed(self, row: Row, seed: int) -> Iterator[bool]:
        """Whether a row is this process's to make: not while another one makes it.

        The claim ends with the process, however that ends. Where the system has no such locks, all
        may make it, and the last one's is kept.
        """
        file = self.folder / f".{row.key}.{seed}.lock"
        with writing(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, mine = _locked(file)
        try:
            yield mine
        finally:
            if mine:
                file.unlink(missing_ok=True)
            os.close(handle)

    def seeds(self, row: Row) -> list[int]:
        """Seeds with which a row is there."""
        ends = (file.stem.rpartition(".")[2] for file in self.folder.glob(f"{row.key}.*.json"))
        return sorted(int(end) for end in ends if end.isdecimal())

    def all(self, row: Row) -> dict[int, Made]:
        """A row with every seed there is."""
        found = {seed: self.made(row, seed) for seed in self.seeds(row)}
        return {seed: made for seed, made in found.items() if made is not None}

    def figures(self, row: Row) -> dict[str, list[float]]:
        """What was measured, by column; a column that is not in it is missing.

        A row from scratch is compared with the network that was trained without pruning, as soon as
        that is there; one from trained weights with those, which it measured itself.
        """
        made = self.all(row).values()
        found = {
            key: values
            for key in self.table.keys
            if (values := [own for m in made if (own := m.ours.get(key)) is not None])
        }
        whole = self._whole(row) if found and row.start == "scratch" else {}
        for names, key in zip(self.table.accuracies, BASELINES.keys, strict=False):
            before, after, drop = names.before, names.after, names.drop
            if before is not None and before not in found and key in whole:
                found[before] = whole[key]
            if before in found and after in found and drop is not None and drop not in found:
                found[drop] = [mean(found[before]) - mean(found[after])]
        return found

    def _whole(self, row: Row) -> dict[str, list[float]]:
        return {} if self.baselines is None else self.baselines.figures(baseline_of(row.network))

    def _known(self, row: Row, seed: int) -> dict[str, Any]:
        told = {} if self._settings is None else dict(self._settings(row, seed))
        plain: dict[str, Any] = json.loads(json.dumps(told))
        return plain

    def _file(self, row: Row, seed: int) -> Path:
        return self.folder / f"{row.key}.{seed}.json"


def _differ(kept: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Settings that are not what they were; weights that are not here cannot be told apart."""
    keys = set(kept) | set(now)
    unknown = {WEIGHTS} if now.get(WEIGHTS) is None else set()
    return {key for key in keys - unknown if kept.get(key) != now.get(key)}


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a figure is not finite")
    return number


def _locked(file: Path) -> tuple[int, bool]:
    """An open file, and whether its lock is ours; one that its owner took away is made again."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        if not locked(handle):
            return handle, False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), file.stat()):
                return handle, True
        os.close(handle)
