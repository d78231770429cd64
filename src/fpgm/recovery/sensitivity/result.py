"""The result of `sensitivity`: output error by number of removed units, for every group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fpgm.errors import FileError
from fpgm.utils.safe_read import parse_json, read_text
from fpgm.utils.text import reason
from fpgm.utils.typed_json import Decoder

FORMAT = 2


@dataclass(frozen=True)
class GroupSensitivity:
    """A group, and the output error when the first 0, 1, … of its units are removed."""

    name: str
    units: int
    harm: tuple[float, ...]
    """Squared output error relative to the outputs' squares, after recovery."""
    place: int = 0
    """Index of the group in the model, from 0."""
    accuracy: Mapping[str, float | None] = field(default_factory=dict)
    """By rate, if there were labels: with this group pruned and its consumers solved again."""

    def has(self, rates: Sequence[float]) -> bool:
        """Tell whether accuracy is known at all these rates."""
        return all(str(rate) in self.accuracy for rate in rates)

    def at(self, rate: float) -> float:
        """Return the output error at a rate, interpolated between whole units."""
        places = np.linspace(0, 1, len(self.harm))
        return float(np.interp(rate, places, self.harm))


@dataclass(frozen=True)
class Sensitivity:
    """Output errors of every group, and the options and data they were measured with."""

    groups: tuple[GroupSensitivity, ...]
    asked: Mapping[str, Any]
    inputs: int
    data: str = ""
    """Digest of the inputs and their labels."""
    accuracy: float | None = None
    """Of the unpruned model, on the same inputs."""
    complete: bool = True
    """Whether every group was measured; False after an interruption."""

    def curve(self, name: str, units: int, which: int = 0) -> list[float]:
        """Return the output error for 0 to `units` removed units of a group, interpolated.

        For a group that was not measured, it is the mean of all groups at the same rate.

        Args:
            name: of the group.
            units: its present size, which may differ from that when it was measured.
            which: index among groups of the same name.
        """
        same = [g for g in self.groups if g.name == name]
        chosen = same[which : which + 1] or same[:1] or list(self.groups)
        rates = [count / units for count in range(units + 1)]
        return [sum(group.at(rate) for group in chosen) / len(chosen) for rate in rates]

    def to_json(self, indent: int | None = None) -> str:
        """Convert to JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=indent)

    @classmethod
    def read(cls, file: Path) -> Sensitivity:
        """Read a file with what `to_json` wrote."""
        try:
            return cls.from_json(read_text(file))
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"{file} cannot be read: {reason(error)}.") from error
        except FileError as error:
            raise FileError(f"{file}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Sensitivity:
        """Read what `to_json` wrote."""
        try:
            content = parse_json(text)
            if content["format"] != FORMAT:
                raise FileError(
                    f"The sensitivity has format {content['format']}, not {FORMAT}: "
                    "measure it again."
                )
            result = Decoder().record(cls, content)
        except (ValueError, KeyError, TypeError) as error:
            raise FileError("This is not a sensitivity file written by fpgm.") from error
        if not result.groups:
            raise FileError("The sensitivity has no groups: measure it again.")
        if any(len(group.harm) != group.units + 1 for group in result.groups):
            raise FileError("The sensitivity has missing errors: measure it again.")
        return result
