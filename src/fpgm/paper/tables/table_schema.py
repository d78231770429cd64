"""The data structures of a table of the paper: columns, rows, and how to reproduce each row.

The tables themselves are in `paper_tables`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fpgm.utils.tables import format_mean_std

Start = Literal["scratch", "trained"]


@dataclass(frozen=True)
class Column:
    """One metric and its number format."""

    key: str
    """Name under which values are stored."""
    title: str = ""
    format_spec: str = ".2f"
    deterministic: bool = False
    """The value does not depend on the seed: no standard deviation is shown."""

    @property
    def name(self) -> str:
        """Header of the column."""
        return self.title or self.key

    def format_paper(self, value: float | None, spread: float | None = None) -> str:
        """Format a value of the paper.

        >>> Column("accuracy").format_paper(92.2, 0.18)
        '92.20 ± 0.18'
        >>> Column("FLOPs left", format_spec=".2E").format_paper(2.43e7)
        '2.43E7'
        """
        if value is None:
            return "–"
        return self._format(value) + ("" if spread is None else f" ± {self._format(spread)}")

    def format_ours(self, values: Sequence[float]) -> str:
        """Format our values: the mean over seeds and the standard deviation.

        >>> Column("accuracy").format_ours([90.0, 92.0])
        '91.00 ± 1.41'
        >>> Column("FLOPs", deterministic=True).format_ours([50.0, 50.0])
        '50.00'
        """
        deterministic = self.deterministic and len(set(values)) == 1
        return _shorten_exponent(
            format_mean_std(values[:1] if deterministic else values, self.format_spec)
        )

    def format_difference(self, paper: float | None, values: Sequence[float]) -> str:
        """Format the difference of our mean to the paper's value.

        >>> Column("accuracy").format_difference(91.5, [90.0, 92.0])
        '-0.50'
        """
        if paper is None or not values:
            return ""
        return _shorten_exponent(format(statistics.mean(values) - paper, f"+{self.format_spec}"))

    def _format(self, value: float) -> str:
        return _shorten_exponent(format(value, self.format_spec))


def _shorten_exponent(text: str) -> str:
    """Write powers of ten as the paper does, 2.43E7."""
    return re.sub(r"E([+-])0*(\d)", lambda match: f"E{match[1].strip('+')}{match[2]}", text)


@dataclass(frozen=True)
class AccuracyColumns:
    """Keys of the columns with an accuracy after and before pruning, and with its drop."""

    after: str
    before: str | None = None
    drop: str | None = None


@dataclass(frozen=True)
class TableRow:
    """One row of the paper, and how to reproduce it."""

    key: str
    """Name for `--rows` and for files."""
    labels: tuple[str, ...]
    paper: Mapping[str, float | None]
    """The paper's values by column."""
    network: str
    method: str
    """A method of `fpgm.paper.baselines`, or a criterion if a recipe prunes during training."""
    macs: float
    """Fraction of MACs removed, according to the paper."""
    rate: float | None = None
    start: Start = "scratch"
    recipe: str | None = None
    """The training recipe at full scale, if there is one."""
    changes: tuple[str, ...] = ()
    """Changes to the recipe, as for `fpgm train --set`."""
    epochs: int = 0
    """Total epochs at full scale."""
    cited: bool = False
    """Whether the paper cites the values from another paper; here the method is run."""
    prunes: bool = True
    """Whether the recipe is used with its pruning."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """The paper's standard deviations by column."""

    @property
    def imagenet(self) -> bool:
        """Whether the row is about ImageNet; all others are about CIFAR-10."""
        return self.network.startswith("torchvision:")

    @property
    def needs_weights(self) -> bool:
        """Whether reproducing the row needs trained weights.

        A cited method selects units by trained weights even if the pruned network is then trained
        from scratch.
        """
        return self.start == "trained" or (self.cited and self.method != "mil")

    @property
    def network_name(self) -> str:
        """The network's name without its source."""
        return self.network.removeprefix("torchvision:")


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper."""

    name: str
    title: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    accuracies: tuple[AccuracyColumns, ...] = ()
    """Top-1, then top-5 if the table has it."""

    def row(self, key: str) -> TableRow:
        """Return a row by its key."""
        return next(row for row in self.rows if row.key == key)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the columns."""
        return tuple(column.key for column in self.columns)
