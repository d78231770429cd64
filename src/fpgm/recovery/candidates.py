"""Compare candidates for the recovered model with the original, and choose the best.

Least squares can leave a smaller squared error and yet a worse classifier than re-estimated batch
norms do. So where outputs are class scores, candidates are ranked by how often their largest score
is the original's; a divergence of the scores decides between those that are equally good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpgm.utils.calibration_data import Inputs
from fpgm.utils.example_inputs import float_outputs, squared_error

MIN_CLASSES = 10
"""Rows of at least this many numbers count as class scores, shorter ones only with labels."""


@dataclass(frozen=True)
class Candidate:
    """A model that recovery could return, compared with the original."""

    name: str
    error: float
    """Squared error of the outputs, relative to the original outputs' squares."""
    agreement: float | None = None
    """Fraction of inputs for which the largest class score is the original's."""
    divergence: float | None = None
    """Mean Kullback-Leibler divergence of the class probabilities from the original's."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)


@dataclass
class _CandidateSums:
    """Sums over the inputs for one candidate."""

    error: float = 0.0
    agreeing: float = 0.0
    divergence: float = 0.0

    def values(self) -> tuple[float, float, float]:
        return self.error, self.agreeing, self.divergence

    def add_scores(self, scores: Tensor, targets: Tensor) -> None:
        self.agreeing += int((scores.argmax(1) == targets.argmax(1)).sum())
        logs, expected = (F.log_softmax(t.double(), 1) for t in (scores, targets))
        self.divergence += float(F.kl_div(logs, expected, reduction="sum", log_target=True))


@torch.no_grad()
def compare_candidates(
    model: nn.Module, nets: Mapping[str, nn.Module], inputs: Inputs
) -> list[Candidate] | None:
    """Compare nets with the original; None if no output has the original's shape.

    Values that are not finite are left out of the error.
    """
    sums = {name: _CandidateSums() for name in nets}
    size, scored, compared = 0.0, 0.0, 0.0
    for number in range(len(inputs)):
        example = inputs[number]
        targets = float_outputs(model, example)
        outputs = {name: float_outputs(net, example) for name, net in nets.items()}
        for place, target in enumerate(targets):
            if any(out[place].shape != target.shape for out in outputs.values()):
                continue
            compared += 1
            size += squared_error(torch.zeros_like(target), target)
            is_scores = place == 0 and _is_class_scores(target, inputs.has_labels)
            scored += len(target) if is_scores else 0
            for name, out in outputs.items():
                sums[name].error += squared_error(out[place], target)
                if is_scores:
                    sums[name].add_scores(out[place], target)
    totals = torch.tensor(
        [size, scored, compared, *(value for s in sums.values() for value in s.values())],
        dtype=torch.float64,
    )
    inputs.ranks.sum_(totals)
    size, scored, compared, *values = totals.tolist()
    sums = {name: _CandidateSums(*values[3 * i : 3 * i + 3]) for i, name in enumerate(sums)}
    if not compared:
        return None
    if not scored:
        return [Candidate(name, s.error / (size or 1.0)) for name, s in sums.items()]
    return [
        Candidate(name, s.error / (size or 1.0), s.agreeing / scored, s.divergence / scored)
        for name, s in sums.items()
    ]


def choose_candidate(candidates: list[Candidate], inputs: int) -> int:
    """Return the place of the best candidate; the first is kept unless another is better.

    Those with outputs that are not finite are chosen only if all have such outputs. Agreements
    that differ by less than half a standard error count as equal. If all agree on every input, the
    squared error decides.

    >>> pruned = Candidate("pruned", 0.9, 0.1, 2.0)
    >>> norms = Candidate("batch norms", 0.5, 0.3, 1.5)
    >>> choose_candidate([pruned, norms, Candidate("solved", 0.4, 0.01, 1.9)], 500)
    1
    """
    order = [i for i, candidate in enumerate(candidates) if math.isfinite(candidate.error)]
    order = order or list(range(len(candidates)))
    agreements = [candidate.agreement for candidate in candidates]
    known = [agreement for i in order if (agreement := agreements[i]) is not None]
    tells_nothing = not known or min(known) == 1.0  # as where one number is always the largest
    if tells_nothing or all(math.isnan(candidates[i].divergence or 0.0) for i in order):
        return min(order, key=lambda i: _nan_last(candidates[i].error))
    best = max(known)
    slack = math.sqrt(max(best * (1 - best), 1 / max(inputs, 1)) / max(inputs, 1)) / 2
    near = [i for i in order if (agreements[i] or 0.0) >= best - slack]
    return min(near, key=lambda i: _nan_last(candidates[i].divergence))


def _nan_last(value: float | None) -> tuple[bool, float]:
    """Sort NaN behind all numbers."""
    value = math.nan if value is None else value
    return math.isnan(value), value


def _is_class_scores(target: Tensor, has_labels: bool) -> bool:
    """Tell whether an output has one row of class scores for each input."""
    if target.ndim != 2 or not bool(target.isfinite().all()):
        return False
    return target.shape[1] >= (2 if has_labels else MIN_CLASSES)
