"""Which multiple widths should be of, by measurement: odd widths cost some runtimes dearly."""

from __future__ import annotations

from collections.abc import Sequence

from fpgm.latency.lookup_table import Table
from fpgm.tracing.layer_calls import Called, Layer

STEPS = (1, 2, 4, 8, 16, 32)
_ENOUGH = 0.95
"""A finer step is taken if layers are this nearly as fast there as between two coarse steps."""
_LAYERS = 3
"""The dearest layers decide."""
_WIDTHS = 2
"""Widths tried of each layer for each step."""


def best_step(called: Sequence[Called], table: Table) -> int | None:
    """The smallest multiple at which the dearest layers lose nothing; None if all are too narrow.

    Between two multiples of the coarsest step a layer's time should grow with its work, whatever
    it takes before any work is done. Steps at which it takes longer than that are too fine.
    """
    layers = _dearest(called, table)
    if not layers:
        return None
    finer = (step for step in STEPS[:-1] if _fairness(layers, step, table) >= _ENOUGH)
    found = next(finer, STEPS[-1])
    table.save()
    return found


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


def _fairness(layers: Sequence[Layer], step: int, table: Table) -> float:
    """Time that is due, as a share of what layers take at odd multiples of a step; their mean."""
    found = []
    for layer in layers:
        for reads, writes in zip(_odd(layer.reads, step), _odd(layer.writes, step), strict=True):
            odd = layer.sized(reads, writes)
            found.append(_due(odd, layer, table) / table.seconds(odd))
    return sum(found) / len(found)


def _due(odd: Layer, whole: Layer, table: Table) -> float:
    """What a layer should take by the two of coarse widths around it, in proportion to its work."""
    coarse = STEPS[-1]
    low = whole.sized(odd.reads // coarse * coarse, odd.writes // coarse * coarse)
    high = whole.sized(low.reads + coarse, low.writes + coarse)
    (less, work, more) = (own.reads * own.writes for own in (low, odd, high))
    part = (work - less) / (more - less)
    return (1 - part) * table.seconds(low) + part * table.seconds(high)


def _odd(width: int, step: int) -> list[int]:
    """Odd multiples of a step nearest to 70 % of a width, between two multiples of the coarsest.

    >>> _odd(64, 8), _odd(64, 1), _odd(64, 16)
    ([40, 56], [45, 43], [48, 48])
    """
    last = width // STEPS[-1] * STEPS[-1]
    odd = [n for n in range(step, last, 2 * step) if n > STEPS[-1]]
    near = sorted(odd, key=lambda n: (abs(n - 0.7 * width), n))
    return [near[number % len(near)] for number in range(_WIDTHS)]
