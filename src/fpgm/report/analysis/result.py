"""What is known of a model's filters, as plain values: figures and reports need nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SMALL_DEVIATION = 0.25
"""Standard deviation of norms, as a share of their mean, below which they hardly differ."""
LARGE_MINIMUM = 0.1
"""Smallest norm, as a share of the mean, above which no filter is as good as silent."""


@dataclass(frozen=True)
class LayerAnalysis:
    """One layer; everything by filter is in the order of its filters."""

    layer: str
    writes: tuple[str, ...]
    """Groups its filters belong to; none, if none of them may go."""
    reads: tuple[str, ...]
    """Groups whose units it reads."""
    write_groups: tuple[int, ...]
    read_groups: tuple[int, ...]
    """The same groups by number, as a plan has them: names of groups may be the same."""
    macs_share: float
    params_share: float
    norms: tuple[float, ...]
    deviation: float
    """Standard deviation of the norms, as a share of their mean: the first requirement."""
    least: float
    """Smallest norm, as a share of the mean: the second."""
    to_median: tuple[float, ...] = ()
    """Distance of each filter to the geometric median of them all. This and what follows is left
    out of layers so large that it would take long, where one is in a hurry."""
    to_nearest: tuple[float, ...] = ()
    """Distance of each filter to the nearest other one."""
    places: tuple[tuple[float, ...], ...] = ()
    """Each filter on a plane whose origin is the geometric median: where they spread most."""
    effective_rank: float | None = None
    """Of how many filters' worth the layer is: between 1 and their number."""
    overlap: Mapping[str, float] = field(default_factory=dict)
    """Share of the filters that two criteria would both remove, of those that either has to."""

    @property
    def filters(self) -> int:
        """How many there are."""
        return len(self.norms)

    @property
    def prunable(self) -> bool:
        """Whether any of its filters may go."""
        return bool(self.writes)

    @property
    def nearest_share(self) -> float | None:
        """How far the nearest other filter is, in the median, as a share of the mean norm."""
        if not self.to_nearest:
            return None
        mean = statistics.fmean(self.norms)
        return statistics.median(self.to_nearest) / mean if mean else 0.0

    @property
    def verdict(self) -> str:
        """What the two requirements say, in words."""
        return verdict(self.deviation, self.least)


@dataclass(frozen=True)
class Analysis:
    """Layers in the order they first run."""

    rate: float
    """Share of filters that criteria were asked to choose."""
    layers: tuple[LayerAnalysis, ...]
    groups: tuple[str, ...] = ()
    """Names of the model's groups, in the order of a plan's."""

    def verdicts(self) -> dict[str, list[str]]:
        """Layers by what is said about them, most of them first."""
        found: dict[str, list[str]] = {}
        for own in self.layers:
            found.setdefault(own.verdict, []).append(own.layer)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def to_dict(self) -> dict[str, Any]:
        """As plain values, verdicts included."""
        layers = [{**asdict(own), "verdict": own.verdict} for own in self.layers]
        return {"rate": self.rate, "groups": list(self.groups), "layers": layers}


def verdict(deviation: float, least: float) -> str:
    """The two requirements in words.

    >>> verdict(0.1, 0.01)
    'small deviation: a norm threshold cannot separate these filters'
    >>> verdict(0.5, 0.4)
    'large minimum norm: even the smallest filter has a part in the output'
    >>> verdict(0.5, 0.01)
    'norms differ and the smallest is near zero: both requirements hold'
    """
    found = []
    if deviation < SMALL_DEVIATION:
        found.append("small deviation: a norm threshold cannot separate these filters")
    if least > LARGE_MINIMUM:
        found.append("large minimum norm: even the smallest filter has a part in the output")
    return "; ".join(found) or "norms differ and the smallest is near zero: both requirements hold"
