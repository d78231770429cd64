"""What the user asks for: how much to remove, and how counts are rounded. Values only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fpgm.errors import RequestError

Rounding = Literal["nearest", "paper"]
Measure = Literal["macs", "params", "latency"]

MEASURES: tuple[Measure, ...] = ("macs", "params", "latency")
WAYS = ("rate", *MEASURES)
"""Of saying how much goes; one is given."""


@dataclass(frozen=True)
class Budget:
    """One way of saying how much goes: a uniform rate, or a share of MACs, parameters or time."""

    rate: float | None = None
    macs: float | None = None
    params: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    latency: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in WAYS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"Give one budget, not {len(given)}: {', '.join(given)}.")
        if not given and not self.rates:
            raise RequestError("Say how much to remove: rate=, macs=, params=, latency= or rates=.")
        for name in given:
            check_share(name, getattr(self, name))
        for pattern, rate in self.rates.items():
            check_share(f"rates[{pattern!r}]", rate)

    def scaled(self, share: float) -> Budget:
        """The same request at a share of its size: what a ramp asks for on its way up."""
        if share == 1:
            return self

        def part(amount: float | None) -> float | None:
            return None if amount is None else amount * share

        rates = {pattern: rate * share for pattern, rate in self.rates.items()}
        return Budget(
            part(self.rate), part(self.macs), part(self.params), rates, part(self.latency)
        )

    @property
    def target(self) -> tuple[Measure, float] | None:
        """Which cost is to fall by which share, if one is named."""
        for name in MEASURES:
            share = getattr(self, name)
            if share is not None:
                return name, share
        return None

    def asked(self) -> dict[str, Any]:
        """What was asked, for the plan."""
        chosen: dict[str, Any] = {
            name: getattr(self, name) for name in WAYS if getattr(self, name) is not None
        }
        return {**chosen, **({"rates": dict(self.rates)} if self.rates else {})}


ALIGN = 16
"""Channels that the widest vector units take at once: runtimes take as long for 40 as for 48."""


@dataclass(frozen=True)
class Rounder:
    """How many units of a pool stay at a given rate."""

    align: int = ALIGN
    rounding: Rounding = "nearest"
    min_channels: int = 1
    steps: int = 8
    """Narrow layers have smaller steps, so that there are at least so many to the whole width."""

    def __post_init__(self) -> None:
        if not isinstance(self.align, int) or self.align < 1:
            raise RequestError(f"align is {self.align!r}: give a whole number from 1 up.")
        if not isinstance(self.min_channels, int) or self.min_channels < 1:
            raise RequestError(
                f"min_channels is {self.min_channels!r}: give a whole number from 1 up."
            )
        if self.rounding not in ("nearest", "paper"):
            raise RequestError(f"rounding is {self.rounding!r}: give 'nearest' or 'paper'.")

    def kept(self, units: int, rate: float, channels_per_unit: int = 1) -> int:
        """Units that stay. `paper` removes int(n · rate); `nearest` aims at aligned widths.

        >>> Rounder(align=8).kept(64, 0.4), Rounder(align=8).kept(16, 0.4)
        (40, 10)
        >>> Rounder(rounding="paper").kept(64, 0.4)
        39
        """
        lowest = min(units, math.ceil(self.min_channels / channels_per_unit))
        if self.rounding == "paper":
            return max(lowest, units - int(units * rate + 1e-9))
        step = self.step(units, channels_per_unit)
        kept = math.floor(units * (1 - rate) / step + 0.5) * step
        return max(lowest, min(units, kept))

    def step(self, units: int, channels_per_unit: int = 1) -> int:
        """Alignment in units: the largest of align, align/2, …, 1 that divides the width enough."""
        if self.rounding == "paper":
            return 1
        channels = self.align
        while channels > 1 and channels * self.steps > units * channels_per_unit:
            channels //= 2
        return max(1, channels // math.gcd(channels, channels_per_unit))


def check_share(name: str, value: object) -> None:
    """A share is a number from 0 up to, but not including, 1."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or math.isnan(value)
        or not 0 <= value < 1
    ):
        raise RequestError(
            f"{name} is {value!r}: give a share of at least 0 and below 1{_percent(value)}."
        )


def _percent(value: object) -> str:
    """A hint at the share that was perhaps meant: nobody means 1.5 percent.

    >>> _percent(40), _percent("40%"), _percent(1.5)
    (' (did you mean 0.4?)', ' (did you mean 0.4?)', '')
    """
    text = value.removesuffix("%") if isinstance(value, str) else value
    try:
        percent = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f" (did you mean {percent / 100:g}?)" if 2 <= percent < 100 else ""


def check_patterns(name: str, patterns: Sequence[str], known: Sequence[str]) -> None:
    """Every pattern must match a layer; a miss names the nearest layers."""
    import difflib
    import fnmatch

    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(layer, pattern) for layer in known):
            inside = pattern.rstrip(".*") + "."
            near = difflib.get_close_matches(pattern, known, 3, 0.3)
            if any(layer.startswith(inside) for layer in known):
                near = [f"{inside}*"]
            hint = f" Nearest: {', '.join(near)}." if near else ""
            raise RequestError(f"{name}: no layer matches {pattern!r}.{hint}")
