"""Find the multiple that widths should be rounded to, by timing layers at aligned and odd widths.

Some runtimes are much slower at widths that are not a multiple of 8 or 16.
"""

from __future__ import annotations

from collections.abc import Sequence

from fpgm.latency.lookup_table import LatencyTable
from fpgm.tracing.layer_calls import LayerCall, LayerSpec

STEPS = (1, 2, 4, 8, 16, 32)
_MIN_EFFICIENCY = 0.95
"""A finer step is taken if layers reach this fraction of the speed at coarse widths."""
_MAX_LAYERS = 3
"""The most expensive layers decide."""
_WIDTHS_PER_LAYER = 2
"""Widths to time for each layer and step."""


def best_step(called: Sequence[LayerCall], table: LatencyTable) -> int | None:
    """Return the smallest multiple at which expensive layers lose no speed; None if all are narrow.

    Between two multiples of the coarsest step, a layer's time should grow in proportion to its
    MACs. Steps at which it takes longer than that are too fine.
    """
    layers = _most_expensive(called, table)
    if not layers:
        return None
    finer = (step for step in STEPS[:-1] if _efficiency(layers, step, table) >= _MIN_EFFICIENCY)
    best = next(finer, STEPS[-1])
    table.save()
    return best


def _most_expensive(called: Sequence[LayerCall], table: LatencyTable) -> list[LayerSpec]:
    """Return the layers that take the most time, among those wide enough to try all steps."""
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
    return [wide[key] for key in sorted(times, key=lambda key: -times[key])[:_MAX_LAYERS]]


def _efficiency(layers: Sequence[LayerSpec], step: int, table: LatencyTable) -> float:
    """Average expected over measured time of layers at odd multiples of a step."""
    ratios = []
    for layer in layers:
        for reads, writes in zip(
            _odd_multiples(layer.reads, step), _odd_multiples(layer.writes, step), strict=True
        ):
            odd = layer.with_widths(reads, writes)
            ratios.append(_expected_seconds(odd, layer, table) / table.seconds(odd))
    return sum(ratios) / len(ratios)


def _expected_seconds(odd: LayerSpec, layer: LayerSpec, table: LatencyTable) -> float:
    """Interpolate the time of a layer between the coarse widths around it, by its MACs."""
    coarse = STEPS[-1]
    low = layer.with_widths(odd.reads // coarse * coarse, odd.writes // coarse * coarse)
    high = layer.with_widths(low.reads + coarse, low.writes + coarse)
    (low_cost, cost, high_cost) = (sized.reads * sized.writes for sized in (low, odd, high))
    part = (cost - low_cost) / (high_cost - low_cost)
    return (1 - part) * table.seconds(low) + part * table.seconds(high)


def _odd_multiples(width: int, step: int) -> list[int]:
    """Return the odd multiples of a step nearest to 70 % of a width, off the coarsest multiples.

    >>> _odd_multiples(64, 8), _odd_multiples(64, 1), _odd_multiples(64, 16)
    ([40, 56], [45, 43], [48, 48])
    """
    last = width // STEPS[-1] * STEPS[-1]
    odd = [n for n in range(step, last, 2 * step) if n > STEPS[-1]]
    near = sorted(odd, key=lambda n: (abs(n - 0.7 * width), n))
    return [near[number % len(near)] for number in range(_WIDTHS_PER_LAYER)]
