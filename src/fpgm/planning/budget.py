"""The to_dict budget: how much to remove. Values only."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fpgm.errors import RequestError
from fpgm.utils.text import nearest_names

Measure = Literal["macs", "params", "latency"]

MEASURES: tuple[Measure, ...] = ("macs", "params", "latency")
BUDGET_KINDS = ("rate", *MEASURES)
"""Ways to say how much to remove; a budget has one of them."""


@dataclass(frozen=True)
class Budget:
    """How much to remove: a uniform rate, or a fraction of MACs, parameters or latency."""

    rate: float | None = None
    macs: float | None = None
    params: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    latency: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in BUDGET_KINDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"Give one budget, not {len(given)}: {', '.join(given)}.")
        if not given and not self.rates:
            raise RequestError("Say how much to remove: rate=, macs=, params=, latency= or rates=.")
        for name in given:
            check_fraction(name, getattr(self, name))
        for pattern, rate in self.rates.items():
            check_fraction(f"rates[{pattern!r}]", rate)

    def scale(self, fraction: float) -> Budget:
        """Return a fraction of this budget, for a pruning schedule with a ramp."""
        if fraction == 1:
            return self

        def part(amount: float | None) -> float | None:
            return None if amount is None else amount * fraction

        rates = {pattern: rate * fraction for pattern, rate in self.rates.items()}
        return Budget(
            part(self.rate), part(self.macs), part(self.params), rates, part(self.latency)
        )

    @property
    def target(self) -> tuple[Measure, float] | None:
        """Return which cost to reduce by which fraction, if the budget names one."""
        for name in MEASURES:
            fraction = getattr(self, name)
            if fraction is not None:
                return name, fraction
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the request as the plan stores it."""
        chosen: dict[str, Any] = {
            name: getattr(self, name) for name in BUDGET_KINDS if getattr(self, name) is not None
        }
        return {**chosen, **({"rates": dict(self.rates)} if self.rates else {})}


def check_fraction(name: str, value: object) -> None:
    """Raise unless a value is a number from 0 up to, but not including, 1."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or math.isnan(value)
        or not 0 <= value < 1
    ):
        raise RequestError(
            f"{name} is {value!r}: give a fraction of at least 0 and below 1{_percent_hint(value)}."
        )


def _percent_hint(value: object) -> str:
    """Suggest the fraction that was probably meant; 1.5 is never meant as a percentage.

    >>> _percent_hint(40), _percent_hint("40%"), _percent_hint(1.5)
    (' (did you mean 0.4?)', ' (did you mean 0.4?)', '')
    """
    text = value.removesuffix("%") if isinstance(value, str) else value
    try:
        percent = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f" (did you mean {percent / 100:g}?)" if 2 <= percent < 100 else ""


def check_patterns(name: str, patterns: Sequence[str], known: Sequence[str]) -> None:
    """Raise if a pattern matches no layer; the error names the closest layers."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(layer, pattern) for layer in known):
            inside = pattern.rstrip(".*") + "."
            near = nearest_names(pattern, known, most=3, likeness=0.3)
            if any(layer.startswith(inside) for layer in known):
                near = [f"{inside}*"]
            hint = f" Nearest: {', '.join(near)}." if near else ""
            raise RequestError(f"{name}: no layer matches {pattern!r}.{hint}")
