"""Store reproduced rows as files in a folder that several machines can fill together.

There is one JSON file per row and seed. A row that has a file is not computed again; a row without
one is shown as missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from fpgm.errors import FileError
from fpgm.paper.tables.paper_tables import BASELINES, baseline_row
from fpgm.paper.tables.table_schema import PaperTable, TableRow
from fpgm.utils.atomic_io import explain_write_errors, write_text
from fpgm.utils.file_lock import ProcessLock
from fpgm.utils.text import reason

Settings = Callable[[TableRow, int], Mapping[str, Any]]
"""Returns the settings that a row's result depends on, by row and seed."""
WEIGHTS = "weights"
"""Setting with the digest of the weights that a row starts from; None if they are not available."""


@dataclass(frozen=True)
class RowResult:
    """The result of one row with one seed."""

    ours: Mapping[str, float | None]
    """Values by column, in the paper's units."""
    seconds: float
    how: str
    """What was done at this scale, as a sentence."""


class RowStore:
    """Loads and saves the results of one table at one scale.

    Args:
        out: the folder of all tables.
        table: the table.
        scale: quick or full.
        settings: if given, results that were computed with other settings are rejected.
    """

    def __init__(
        self, out: Path, table: PaperTable, scale: str, settings: Settings | None = None
    ) -> None:
        self.table, self.scale = table, scale
        self.folder = out / f"{table.name}-{scale}"
        self._settings = settings
        self.baselines: RowStore | None = None
        """Results of unpruned networks, for tables that compare with them."""
        if any(columns.before is not None for columns in table.accuracies):
            self.baselines = RowStore(out, BASELINES, scale, settings)

    def load(self, row: TableRow, seed: int) -> RowResult | None:
        """Load the result of a row with one seed; None if there is none."""
        file = self._file(row, seed)
        if not file.exists():
            return None
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            settings = dict(document["settings"])
            ours = {str(key): _finite_or_none(value) for key, value in document["ours"].items()}
            result = RowResult(ours, float(document["seconds"]), str(document["how"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{file} cannot be read: {reason(error)}.") from error
        current = self._current_settings(row, seed)
        if self._settings is not None and _changed_settings(settings, current):
            changed = [key for key in current if key in _changed_settings(settings, current)] or [
                "setting"
            ]
            raise FileError(
                f"{file} was computed with a different {', '.join(changed)}: choose another --out, "
                "or delete it."
            )
        return result

    def check(self) -> None:
        """Load all results, to reject those with other settings before a long computation."""
        for row in self.table.rows:
            self.load_all(row)
        if self.baselines is not None:
            self.baselines.check()

    def save(self, row: TableRow, seed: int, result: RowResult, command: str) -> None:
        """Write the result of a row with one seed."""
        file = self._file(row, seed)
        document = {
            "table": self.table.name, "row": row.key, "scale": self.scale, "seed": seed,
            "ours": dict(result.ours), "printed": dict(row.paper), "seconds": result.seconds,
            "how": result.how, "command": command, "settings": self._current_settings(row, seed),
        }  # fmt: skip
        with explain_write_errors(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(document, indent=1, allow_nan=False) + "\n")

    @contextmanager
    def claim(self, row: TableRow, seed: int) -> Iterator[bool]:
        """Lock a row; yield False if another process is computing it.

        The lock ends with the process, even if it is killed. Where the system has no such locks,
        several processes may compute a row, and the last result is kept.
        """
        file = self.folder / f".{row.key}.{seed}.lock"
        lock = ProcessLock(file)
        with explain_write_errors(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            acquired = lock.acquire() is not False
        try:
            yield acquired
        finally:
            lock.release()

    def seeds(self, row: TableRow) -> list[int]:
        """List the seeds for which a row has a result."""
        ends = (file.stem.rpartition(".")[2] for file in self.folder.glob(f"{row.key}.*.json"))
        return sorted(int(end) for end in ends if end.isdecimal())

    def load_all(self, row: TableRow) -> dict[int, RowResult]:
        """Load the results of a row by seed."""
        results = {seed: self.load(row, seed) for seed in self.seeds(row)}
        return {seed: result for seed, result in results.items() if result is not None}

    def metrics(self, row: TableRow) -> dict[str, list[float]]:
        """Collect the measured values of a row by column, one per seed, without missing columns.

        A row from scratch is compared with the network that was trained without pruning, if there
        is a result. A row from trained weights has measured these itself.
        """
        results = self.load_all(row).values()
        metrics = {
            key: values
            for key in self.table.keys
            if (values := [value for m in results if (value := m.ours.get(key)) is not None])
        }
        baseline = self._baseline_metrics(row) if metrics and row.start == "scratch" else {}
        for names, key in zip(self.table.accuracies, BASELINES.keys, strict=False):
            before, after, drop = names.before, names.after, names.drop
            if before is not None and before not in metrics and key in baseline:
                metrics[before] = baseline[key]
            if before in metrics and after in metrics and drop is not None and drop not in metrics:
                metrics[drop] = [mean(metrics[before]) - mean(metrics[after])]
        return metrics

    def _baseline_metrics(self, row: TableRow) -> dict[str, list[float]]:
        return {} if self.baselines is None else self.baselines.metrics(baseline_row(row.network))

    def _current_settings(self, row: TableRow, seed: int) -> dict[str, Any]:
        settings = {} if self._settings is None else dict(self._settings(row, seed))
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        return plain

    def _file(self, row: TableRow, seed: int) -> Path:
        return self.folder / f"{row.key}.{seed}.json"


def _changed_settings(kept: Mapping[str, Any], current: Mapping[str, Any]) -> set[str]:
    """Return the settings that differ; weights are not compared if they are not available."""
    keys = set(kept) | set(current)
    ignored = {WEIGHTS} if current.get(WEIGHTS) is None else set()
    return {key for key in keys - ignored if kept.get(key) != current.get(key)}


def _finite_or_none(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a value is not finite")
    return number
