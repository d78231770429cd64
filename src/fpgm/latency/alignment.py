"""Which multiple widths should be of, by measurement: odd widths cost some runtimes dearly."""

from __future__ import annotations

from collections.abc import Sequence

from fpgm.latency.layers import Called, Layer
from fpgm.latency.table import Table

STEPS = (1, 2, 4, 8, 16, 32)
_ENOUGH = 0.95
"""A finer step is taken if layers work this nearly as fast per channel as at the best one."""
_LAYERS = 3
"""The dearest layers decide."""
_WIDTHS = 2
"""Widths tried of each layer for each step."""


def best_step(called: Sequence[Called], table: Table) -> int:
    """The smallest multiple at which the dearest layers run about as fast as at any."""
    layers = _dearest(called, table)
    if not layers:
        return 1
    speeds = {step: _speed(layers, step, table) for step in STEPS}
    table.save()
    top = max(speeds.values())
    return next(step for step in STEPS if speeds[step] >= _ENOUGH * top)


def _dearest(called: Sequence[Called], table: Table) -> list[Layer]:
    """Layers wide enough to try all steps on, those that take the most time first."""
    wide = {
        call.layer.key(): call.layer
        for call in called
        if call.layer.groups == 1 and min(call.layer.reads, call.layer.writes) >= 2 * STEPS[-1]
    }
    times: dict[str, float] = {}
    for call in called:
        key = call.layer.key()
        if key in wide:
            times[key] = times.get(key, 0.0) + table.seconds(call.layer)
    return [wide[key] for key in sorted(times, key=lambda key: -times[key])[:_LAYERS]]


def _speed(layers: Sequence[Layer], step: int, table: Table) -> float:
    """Mean work per second at widths that are multiples of a step and of no larger one."""
    found = []
    for layer in layers:
        for reads, writes in zip(_odd(layer.reads, step), _odd(layer.writes, step), strict=False):
            whole = layer.reads * layer.writes / table.seconds(layer)
            found.append(reads * writes / table.seconds(layer.sized(reads, writes)) / whole)
    return sum(found) / len(found)


def _odd(width: int, step: int) -> list[int]:
    """Odd multiples of a step nearest to 70 % of a width.

    >>> _odd(64, 8), _odd(64, 1)
    ([40, 56], [45, 43])
    """
    odd = range(step, width + 1, 2 * step)
    return sorted(odd, key=lambda n: (abs(n - 0.7 * width), n))[:_WIDTHS]
