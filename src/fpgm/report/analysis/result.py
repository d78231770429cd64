"""The result of `analyze` as plain values, which charts and reports read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SMALL_DEVIATION = 0.25
"""Norms whose standard deviation is below this fraction of their mean hardly differ."""
LARGE_MINIMUM = 0.1
"""If the smallest norm is above this fraction of the mean, no filter is close to zero."""


@dataclass(frozen=True)
class LayerAnalysis:
    """One layer; values per filter are in the order of its filters."""

    layer: str
    writes: tuple[str, ...]
    """Names of the groups that its filters belong to; empty if none of them can be removed."""
    reads: tuple[str, ...]
    """Names of the groups whose units it consumes."""
    write_groups: tuple[int, ...]
    read_groups: tuple[int, ...]
    """The same groups by their indices in a plan, as names need not be unique."""
    macs_share: float
    params_share: float
    norms: tuple[float, ...]
    deviation: float
    """Standard deviation of the norms divided by their mean (the first requirement)."""
    least: float
    """Smallest norm divided by the mean (the second requirement)."""
    to_median: tuple[float, ...] = ()
    """Distance of each filter to the geometric median of all filters.

    This and the following fields are empty for very large layers in quick mode."""
    to_nearest: tuple[float, ...] = ()
    """Distance of each filter to its nearest neighbor."""
    places: tuple[tuple[float, ...], ...] = ()
    """Each filter in the two directions of largest variance; the geometric median is (0, 0)."""
    effective_rank: float | None = None
    """Between 1 and the number of filters."""
    overlap: Mapping[str, float] = field(default_factory=dict)
    """By pair of criteria, the fraction of their choices that is the same."""

    @property
    def filters(self) -> int:
        """Number of filters."""
        return len(self.norms)

    @property
    def prunable(self) -> bool:
        """Whether any of its filters can be removed."""
        return bool(self.writes)

    @property
    def nearest_ratio(self) -> float | None:
        """Median distance of a filter to its nearest neighbor, divided by the mean norm."""
        if not self.to_nearest:
            return None
        mean = statistics.fmean(self.norms)
        return statistics.median(self.to_nearest) / mean if mean else 0.0

    @property
    def verdict(self) -> str:
        """Whether the two requirements of norm-based pruning hold, as a sentence."""
        return verdict(self.deviation, self.least)


@dataclass(frozen=True)
class Analysis:
    """The analysis of all layers, in execution order."""

    rate: float
    """Fraction of the filters that each criterion chose."""
    layers: tuple[LayerAnalysis, ...]
    groups: tuple[str, ...] = ()
    """Names of the model's groups, in the order of a plan."""

    def verdicts(self) -> dict[str, list[str]]:
        """Group the layers' names by verdict, the most frequent verdict first."""
        layers: dict[str, list[str]] = {}
        for layer in self.layers:
            layers.setdefault(layer.verdict, []).append(layer.layer)
        return dict(sorted(layers.items(), key=lambda item: -len(item[1])))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON, with each layer's verdict."""
        layers = [{**asdict(layer), "verdict": layer.verdict} for layer in self.layers]
        return {"rate": self.rate, "groups": list(self.groups), "layers": layers}


def verdict(deviation: float, least: float) -> str:
    """Say whether the two requirements of norm-based pruning hold.

    >>> verdict(0.1, 0.01)
    'small deviation: a norm threshold cannot separate these filters'
    >>> verdict(0.5, 0.4)
    'large minimum norm: even the smallest filter affects the output'
    >>> verdict(0.5, 0.01)
    'norms differ and the smallest is near zero: both requirements hold'
    """
    problems = []
    if deviation < SMALL_DEVIATION:
        problems.append("small deviation: a norm threshold cannot separate these filters")
    if least > LARGE_MINIMUM:
        problems.append("large minimum norm: even the smallest filter affects the output")
    return (
        "; ".join(problems) or "norms differ and the smallest is near zero: both requirements hold"
    )
