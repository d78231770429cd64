"""What was found about every group: how much harm is done by removing so many of its units."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fpgm.errors import FileError
from fpgm.utils.safe_read import parsed, text_of
from fpgm.utils.text import reason

FORMAT = 2


@dataclass(frozen=True)
class GroupHarm:
    """A group's name, its number of units, and the harm when the first 0, 1, … of them go."""

    name: str
    units: int
    harm: tuple[float, ...]
    """Squared error of the outputs as a share of their squares, after recovery."""
    place: int = 0
    """Which of the model's groups it is, counted from 0."""
    accuracy: Mapping[str, float | None] = field(default_factory=dict)
    """By rate, where labels were given: with this group pruned and its readers solved anew."""

    def has(self, rates: Sequence[float]) -> bool:
        """Whether accuracy is known at all these rates."""
        return all(str(rate) in self.accuracy for rate in rates)

    def at(self, rate: float) -> float:
        """Harm at a rate; between whole units on a straight line."""
        places = np.linspace(0, 1, len(self.harm))
        return float(np.interp(rate, places, self.harm))


@dataclass(frozen=True)
class Sensitivity:
    """Every group's harm, and what it was measured with."""

    groups: tuple[GroupHarm, ...]
    asked: Mapping[str, Any]
    inputs: int
    data: str = ""
    """Digest of the inputs and their labels."""
    accuracy: float | None = None
    """Of the whole model, on the same inputs."""
    complete: bool = True
    """Whether every group's harm is there: a measurement may have been interrupted."""

    def curve(self, name: str, units: int, which: int = 0) -> list[float]:
        """Harm for 0 to `units` units of a group, whatever its size when it was measured.

        Of several groups with one name, that with number `which`. Where nothing was measured, the
        mean of all groups at the same share.
        """
        same = [g for g in self.groups if g.name == name]
        chosen = same[which : which + 1] or same[:1] or list(self.groups)
        shares = [count / units for count in range(units + 1)]
        return [sum(group.at(share) for group in chosen) / len(chosen) for share in shares]

    def to_json(self, indent: int | None = None) -> str:
        """As text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=indent)

    @classmethod
    def read(cls, file: Path) -> Sensitivity:
        """Read a file with what `to_json` wrote."""
        try:
            return cls.from_json(text_of(file))
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"{file} cannot be read: {reason(error)}.") from error
        except FileError as error:
            raise FileError(f"{file}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Sensitivity:
        """Read what `to_json` wrote."""
        try:
            held = parsed(text)
            if held["format"] != FORMAT:
                raise FileError(f"A sensitivity in format {held['format']}: measure it again.")
            groups, asked, whole = _groups(held["groups"]), held["asked"], held["accuracy"]
            if not groups or not isinstance(asked, dict):
                raise FileError("A sensitivity without groups: measure it again.")
            if any(len(group.harm) != group.units + 1 for group in groups):
                raise FileError("A sensitivity with harm missing: measure it again.")
            return cls(
                groups,
                asked,
                int(held["inputs"]),
                str(held["data"]),
                None if whole is None else float(whole),
                bool(held["complete"]),
            )
        except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError("This is not a sensitivity written by fpgm.") from error


def _groups(rows: Sequence[Any]) -> tuple[GroupHarm, ...]:
    return tuple(
        GroupHarm(
            str(row["name"]),
            int(row["units"]),
            tuple(float(h) for h in row["harm"]),
            int(row["place"]),
            {str(rate): None if v is None else float(v) for rate, v in row["accuracy"].items()},
        )
        for row in rows
    )
