"""What a table of the paper is made of: columns, and rows that name what makes each of them again.

Values only; the figures themselves are in `printed`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fpgm.utils.tables import mean_and_spread

Start = Literal["scratch", "trained"]


@dataclass(frozen=True)
class Column:
    """One kind of figure, and how the paper prints it."""

    key: str
    """By which figures are kept."""
    title: str = ""
    form: str = ".2f"
    counted: bool = False
    """Seeds do not change it, so a deviation of nothing is not shown."""

    @property
    def name(self) -> str:
        """As it stands above the table."""
        return self.title or self.key

    def printed(self, value: float | None, spread: float | None = None) -> str:
        """What the paper has.

        >>> Column("accuracy").printed(92.2, 0.18), Column("FLOPs left", form=".2E").printed(2.43e7)
        ('92.20 ± 0.18', '2.43E7')
        """
        if value is None:
            return "–"
        return self._told(value) + ("" if spread is None else f" ± {self._told(spread)}")

    def ours(self, values: Sequence[float]) -> str:
        """The mean over seeds, and their deviation.

        >>> Column("accuracy").ours([90.0, 92.0]), Column("FLOPs", counted=True).ours([50.0, 50.0])
        ('91.00 ± 1.41', '50.00')
        """
        once = self.counted and len(set(values)) == 1
        return _short(mean_and_spread(values[:1] if once else values, self.form))

    def difference(self, printed: float | None, values: Sequence[float]) -> str:
        """Ours less what is printed.

        >>> Column("accuracy").difference(91.5, [90.0, 92.0])
        '-0.50'
        """
        if printed is None or not values:
            return ""
        return _short(format(statistics.mean(values) - printed, f"+{self.form}"))

    def _told(self, value: float) -> str:
        return _short(format(value, self.form))


def _short(text: str) -> str:
    """Powers of ten as the paper writes them, 2.43E7."""
    return re.sub(r"E([+-])0*(\d)", lambda found: f"E{found[1].strip('+')}{found[2]}", text)


@dataclass(frozen=True)
class Accuracy:
    """The columns of one accuracy: of the pruned network, of the whole one, and what was lost."""

    after: str
    before: str | None = None
    drop: str | None = None


@dataclass(frozen=True)
class Row:
    """One printed row."""

    key: str
    """By which it is asked for and kept."""
    labels: tuple[str, ...]
    printed: Mapping[str, float | None]
    """By column, as printed."""
    network: str
    method: str
    """Of `fpgm.paper.baselines`, or a criterion where a recipe prunes while training."""
    macs: float
    """Share of MACs that went, by the paper."""
    rate: float | None = None
    start: Start = "scratch"
    recipe: str | None = None
    """That makes it at full scale, if there is one."""
    changes: tuple[str, ...] = ()
    epochs: int = 0
    """Of the whole of it at full scale."""
    quoted: bool = False
    """Whether the paper takes its figures from another one; here the method is run."""
    prunes: bool = True
    """False: the recipe is followed without its pruning."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """Deviations that are printed, by column."""

    @property
    def imagenet(self) -> bool:
        """Whether it is of ImageNet; all others are of CIFAR-10."""
        return self.network.startswith("torchvision:")

    @property
    def begins(self) -> bool:
        """Whether trained weights are needed.

        A quoted method chooses by them even where what it leaves is then trained from fresh ones.
        """
        return self.start == "trained" or (self.quoted and self.method != "mil")

    @property
    def net(self) -> str:
        """The network's name alone."""
        return self.network.removeprefix("torchvision:")


@dataclass(frozen=True)
class Table:
    """One of the paper's tables."""

    name: str
    title: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    accuracies: tuple[Accuracy, ...] = ()
    """Top-1 first, then top-5 if the table has it."""

    def row(self, key: str) -> Row:
        """A row by its key."""
        return next(row for row in self.rows if row.key == key)

    @property
    def keys(self) -> tuple[str, ...]:
        """What its columns are kept by."""
        return tuple(column.key for column in self.columns)
