"""`sensitivity`: which groups can spare how many units, measured on data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fpgm.errors import RequestError
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.recovery.sensitivity.runner import IMAGES, measure_sensitivity
from fpgm.utils.progress import Progress

RATES = (0.2, 0.4, 0.6, 0.8)
"""At which accuracy is counted."""

EVERYTHING = Budget(rate=0.5)
"""A planner needs a budget; harm is measured for all of them."""


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
    **options: Any,
) -> Sensitivity:
    """Measure for every group the harm that removing 1, 2, … of its units does to the outputs.

    Harm is the squared error of the outputs, as a share of their squares, that is left once the
    layers that read the group are solved anew (`fpgm.recover`). `loader` gives batches of inputs;
    if there is a class for each beside them, accuracy with so much of a group gone is counted as
    well, at these `rates`. What is known is written to a file `cache`, from which a measurement
    that was interrupted goes on. `trials=False` leaves harm as probes foretell it, without trying
    it: for models that are trained on afterwards, that leaves more to learn with. Takes the options
    of `plan` that say which units go and where. Give the result to `plan` as `allocate=`.

    >>> import fpgm, torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    >>> x = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    >>> group = fpgm.sensitivity(net, x[0], x).groups[0]
    >>> group.at(0.25) < group.at(0.5)
    True
    """
    planner = Planner(model, example_inputs, budget=EVERYTHING, **options)
    for rate in rates:
        if not 0 < rate < 1:
            raise RequestError(f"rates has {rate!r}: give shares between 0 and 1.")
    file = None if cache is None else Path(cache)
    return measure_sensitivity(
        planner, loader, images, progress, rates=rates, cache=file, trials=trials
    )
