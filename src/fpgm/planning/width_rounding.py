"""Round widths: how many units of a group stay at a given rate. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fpgm.errors import RequestError

Rounding = Literal["nearest", "paper"]

ALIGN = 16
"""Channels per vector operation: runtimes need as long for 40 channels as for 48."""


@dataclass(frozen=True)
class Rounder:
    """Computes how many units of a group stay at a given rate."""

    align: int = ALIGN
    rounding: Rounding = "nearest"
    min_channels: int = 1
    steps: int = 8
    """Smallest number of alignment steps per layer: narrow layers get smaller steps."""

    def __post_init__(self) -> None:
        if not isinstance(self.align, int) or self.align < 1:
            raise RequestError(f"align is {self.align!r}: give an integer of at least 1.")
        if not isinstance(self.min_channels, int) or self.min_channels < 1:
            raise RequestError(
                f"min_channels is {self.min_channels!r}: give an integer of at least 1."
            )
        if self.rounding not in ("nearest", "paper"):
            raise RequestError(f"rounding is {self.rounding!r}: give 'nearest' or 'paper'.")

    def kept_units(self, units: int, rate: float, channels_per_unit: int = 1) -> int:
        """Return how many units stay. `paper` removes int(n · rate); `nearest` aligns widths.

        >>> Rounder(align=8).kept_units(64, 0.4), Rounder(align=8).kept_units(16, 0.4)
        (40, 10)
        >>> Rounder(rounding="paper").kept_units(64, 0.4)
        39
        """
        lowest = min(units, math.ceil(self.min_channels / channels_per_unit))
        if self.rounding == "paper":
            return max(lowest, units - int(units * rate + 1e-9))
        step = self.step(units, channels_per_unit)
        kept = math.floor(units * (1 - rate) / step + 0.5) * step
        return max(lowest, min(units, kept))

    def step(self, units: int, channels_per_unit: int = 1) -> int:
        """Return the alignment in units: the largest of align, align/2, …, 1 that is allowed."""
        if self.rounding == "paper":
            return 1
        channels = self.align
        while channels > 1 and channels * self.steps > units * channels_per_unit:
            channels //= 2
        return max(1, channels // math.gcd(channels, channels_per_unit))
