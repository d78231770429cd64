"""Scores of a group's units: the criterion's scores of the layers that produce them, combined."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fpgm.criteria import Scorer, score
from fpgm.errors import RequestError
from fpgm.tracing.grouping import ChannelGroup, Structure
from fpgm.tracing.producers import Producer
from fpgm.utils.modules import modules_by_path, named_tensors

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


class UnitScores:
    """Scores by a criterion, from the weights as they are; each is computed once and cached."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        scorer_of: Callable[[str], Scorer],
        uses_scale: bool = False,
        uses_rate: bool = True,
    ) -> None:
        self.model = model
        self.tensors = named_tensors(model)
        self.structure = structure
        self.scorer_of = scorer_of
        """The criterion, for each layer's path."""
        self.uses_scale = uses_scale
        """Whether it uses the scale of the norm behind a layer, not its filters."""
        self.uses_rate = uses_rate
        """Whether its scores depend on the rate."""
        self._known: dict[tuple[int, float], Tensor] = {}

    def group_scores(self, group: ChannelGroup, rate: float) -> Tensor:
        """Average each unit's score over the layers, each layer scaled to mean 1 first.

        A depthwise convolution is ignored if its units have a filter elsewhere: it only passes on
        what that filter produces.
        """
        producers = [w for w in group.producers if not w.carries] or list(group.producers)
        if len(producers) == 1 and torch.equal(producers[0].classes, group.units):
            return self._producer_scores(producers[0], rate)
        total = torch.zeros(len(group.units), dtype=torch.float64)
        for producer in producers:
            scores = self._producer_scores(producer, rate)
            mean = float(scores.abs().mean()) if len(producers) > 1 else 1.0
            if not torch.equal(producer.classes, group.units):
                scores = _mean_by_unit(scores, producer.classes, group.units)
            total += scores / (mean if mean > 0 else 1.0)
        return total

    def _producer_scores(self, producer: Producer, rate: float) -> Tensor:
        key = (id(producer), rate if self.uses_rate else 0.0)
        if key not in self._known:
            weight = self.tensors[producer.info.name].detach()
            rows = self._batch_norm_scale(producer) if self.uses_scale else producer.filters(weight)
            scorer = self.scorer_of(producer.layer)
            self._known[key] = score(scorer, rows, rate, producer.layer)
        return self._known[key]

    def _batch_norm_scale(self, producer: Producer) -> Tensor:
        """Return |γ| of the norm after a layer: the scale whose classes are the layer's."""
        modules = modules_by_path(self.model)
        for info in self.structure.trace.parameter_infos.values():
            owner = modules.get(info.name.rpartition(".")[0])
            if info.trainable and info.roles == ["scale"] and isinstance(owner, _NORMS):
                scale_classes = self.structure.classes_of(info.fields[0])
                if torch.equal(scale_classes, producer.classes):
                    return self.tensors[info.name].detach()[:, None]
        raise RequestError(
            f"criterion='bn': layer '{producer.layer}' has no norm with a scale after it; "
            "ignore it or choose another criterion."
        )


def _mean_by_unit(scores: Tensor, classes: Tensor, units: Tensor) -> Tensor:
    """Average the scores of each unit's filters, given the class of every filter.

    >>> _mean_by_unit(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([7, 5, 7]), torch.tensor([5, 7]))
    tensor([2.0000, 2.5000])
    """
    order = units.argsort()
    ranked = units[order]
    near = torch.searchsorted(ranked, classes).clamp(max=len(ranked) - 1)
    rows = ranked[near] == classes
    positions, values = order[near][rows], scores[rows]
    nothing = torch.zeros(len(units), dtype=scores.dtype)
    return nothing.index_add(0, positions, values) / nothing.index_add(
        0, positions, torch.ones_like(values)
    )
