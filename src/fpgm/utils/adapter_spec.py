"""`Adapter`: a gather or scatter of channels at a module, as a value.

The modules that do this are in `channel_adapters`; plans and traces only describe them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["input", "output"]
Kind = Literal["gather", "scatter"]
MAX_DIMS = 8
"""Dims of an activation: a video has 5, windows of attention up to 7."""


@dataclass(frozen=True)
class Adapter:
    """A gather or scatter of channels at a module's input or output.

    `gather` picks `index` along `dim`; `scatter` writes into zeros of `size` at `index`. They are
    used where the user's own code fixes a width: zero-padded shortcuts, shuffles, full-width
    streams.
    """

    module: str
    side: Side
    kind: Kind
    dim: int
    index: tuple[int, ...]
    size: int

    def problem(self) -> str | None:
        """Return why the adapter is not valid, or None."""
        if not 0 <= self.dim < MAX_DIMS:
            return f"no activation has a dim {self.dim}"
        return position_problem(self.index, self.size)


def position_problem(positions: Sequence[int], size: int) -> str | None:
    """Return why positions are not distinct and within a size, or None."""
    if size < 1 or (positions and not 0 <= min(positions) <= max(positions) < size):
        return f"its positions are not among {size}"
    return "some positions appear twice" if len(set(positions)) < len(positions) else None
