"""`sensitivity`: measure on data how much pruning each group tolerates."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from fpgm.errors import RequestError
from fpgm.planning.budget import Budget
from fpgm.planning.options import PlanKeywords, PlanOptions
from fpgm.planning.planner import Planner
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.recovery.sensitivity.runner import IMAGES, measure_sensitivity
from fpgm.utils.allocator import reuse_freed_memory
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.distributed import fails_together
from fpgm.utils.keywords import check_keywords
from fpgm.utils.progress import Progress

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack

RATES = (0.2, 0.4, 0.6, 0.8)
"""Pruning rates at which accuracy is measured."""

PLACEHOLDER_BUDGET = Budget(rate=0.5)
"""A planner needs a budget, but the measurement covers all rates."""


@reuse_freed_memory()
@cpu_by_default()
@fails_together
def sensitivity(
    model: nn.Module,
    example_inputs: Any,
    loader: Iterable[Any],
    *,
    images: int = IMAGES,
    rates: Sequence[float] = RATES,
    cache: str | Path | None = None,
    trials: bool = True,
    progress: Progress | None = None,
    **options: Unpack[PlanKeywords],
) -> Sensitivity:
    """Measure for every group the output error that removing 1, 2, … of its units causes.

    The error is the squared error of the outputs, relative to their squares, that is left after
    the layers that consume the group are solved again (`fpgm.recover`). Give the result to `plan`
    as `allocate=`. If `torch.distributed` is initialized, all ranks call this with the same
    arguments: they divide the inputs among them, and all get the same result.

    Args:
        model: unchanged.
        example_inputs: as for `plan`.
        loader: batches of inputs; with integer labels, accuracy is measured as well.
        images: how many inputs to read from the loader.
        rates: fractions of a group to remove when accuracy is measured.
        cache: file to which results are written; an interrupted measurement continues from it.
        trials: correct the estimates by pruning each group at two rates. `False` uses the probe
            estimate alone: better for models that are trained afterwards.
        progress: called with a title, the number of steps done, and their total.
        **options: those of `plan` that select which units to remove.

    >>> import fpgm, torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    >>> x = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    >>> group = fpgm.sensitivity(net, x[0], x).groups[0]
    >>> group.at(0.25) < group.at(0.5)
    True
    """
    check_keywords("sensitivity", options, _OPTIONS)
    planner = Planner(
        model, example_inputs, budget=PLACEHOLDER_BUDGET, options=PlanOptions(**options)
    )
    for rate in rates:
        if not 0 < rate < 1:
            raise RequestError(f"rates has {rate!r}: give fractions between 0 and 1.")
    file = None if cache is None else Path(cache)
    return measure_sensitivity(
        planner, loader, images, progress, rates=rates, cache=file, trials=trials
    )


_OPTIONS = (*signature(sensitivity).parameters, *PlanKeywords.__annotations__)
"""Everything that can be given by name."""
