"""The options of every plan as one value: which units to remove, and how to round widths.

How much to remove is a `Budget`. Functions that take these options as keywords declare `**options:
Unpack[PlanKeywords]` and turn them into a `PlanOptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from torch import Tensor

from fpgm.errors import RequestError
from fpgm.planning.precomputed_scores import PrecomputedScores
from fpgm.planning.width_rounding import ALIGN, Rounding
from fpgm.tracing.residual import Residual

Criterion = str | Callable[[Tensor], Tensor] | PrecomputedScores
Align = int | Literal["auto"]


@dataclass(frozen=True)
class PlanOptions:
    """What a planner needs besides the budget; `fpgm.plan` explains each option."""

    criterion: Criterion = "fpgm"
    distance: str = "l2"
    residual: Residual = "coupled"
    ignore: Sequence[str] = ()
    align: Align = ALIGN
    rounding: Rounding = "nearest"
    min_channels: int = 1
    approximate: bool = False
    keep_outputs: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.ignore, str):
            raise RequestError(f"ignore is the text {self.ignore!r}: give a list of patterns.")
        if not isinstance(self.ignore, Iterable) or not are_texts(self.ignore):
            raise RequestError(f"ignore is {self.ignore!r}: give a list of patterns.")
        if not isinstance(self.criterion, str | PrecomputedScores) and not callable(self.criterion):
            raise RequestError(f"criterion is {self.criterion!r}: give a name or a function.")
        if self.residual not in ("coupled", "independent"):
            raise RequestError(f"residual is {self.residual!r}: give 'coupled' or 'independent'.")
        if not isinstance(self.seed, int) or abs(self.seed) > _MAX_SEED:
            raise RequestError(f"seed is {self.seed!r}: give an integer below 2**62.")
        for name in ("approximate", "keep_outputs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}: give True or False.")

    @property
    def width_multiple(self) -> int:
        """Return the multiple that widths are rounded to; "auto" has to be measured first."""
        if self.align == "auto":
            raise RequestError(
                "align='auto' is measured by fpgm.plan and fpgm.prune: give an integer here."
            )
        return self.align


_MAX_SEED = 2**62
"""Torch takes seeds of 64 bits; each layer adds a number to it."""


def are_texts(values: Iterable[Any]) -> bool:
    """Tell whether all values are text."""
    return all(isinstance(value, str) for value in values)


DEFAULTS = PlanOptions()


def criterion_name(criterion: Criterion) -> str:
    """Return a criterion's name for the plan."""
    if isinstance(criterion, PrecomputedScores):
        return criterion.name
    return criterion if isinstance(criterion, str) else getattr(criterion, "__name__", "custom")


class PlanKeywords(TypedDict, total=False):
    """The fields of `PlanOptions`, as keywords of a function."""

    criterion: Criterion
    distance: str
    residual: Residual
    ignore: Sequence[str]
    align: Align
    rounding: Rounding
    min_channels: int
    approximate: bool
    keep_outputs: bool
    seed: int
