"""Scores computed in advance, for criteria that need more than a layer's own filters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fpgm.criteria import Scorer
from fpgm.errors import RequestError
from fpgm.tracing.grouping import Structure


@dataclass(frozen=True)
class PrecomputedScores:
    """A criterion's name, and the score of every filter, by layer; the lowest is removed first."""

    name: str
    by_layer: Mapping[str, Tensor]

    @classmethod
    def of_units(cls, name: str, structure: Structure, scores: Tensor) -> PrecomputedScores:
        """Create from one score for every class of a structure."""
        return cls(name, {w.layer: scores[w.classes] for w in structure.producers})

    def scorer(self, layer: str) -> Scorer:
        """Return the scorer of one layer."""
        if layer not in self.by_layer:
            raise RequestError(f"criterion {self.name!r}: layer '{layer}' has no scores.")
        return lambda filters, rate: self.by_layer[layer]
