"""Scores of a pool's units: what a criterion says of the layers that write them, as one number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fpgm.criteria import Scorer, score
from fpgm.errors import RequestError
from fpgm.tracing.grouping import Pool, Structure, Writer
from fpgm.utils.modules import modules_by_path, named_tensors

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


class UnitScores:
    """Scores by a criterion, from the weights as they are; each is computed once and remembered."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        scorer_of: Callable[[str], Scorer],
        uses_scale: bool = False,
    ) -> None:
        self.model = model
        self.tensors = named_tensors(model)
        self.structure = structure
        self.scorer_of = scorer_of
        """The criterion, for each layer's path."""
        self.uses_scale = uses_scale
        """Whether it looks at the scale of the norm behind a layer, not at its filters."""
        self._known: dict[tuple[int, float], Tensor] = {}

    def of(self, pool: Pool, rate: float) -> Tensor:
        """Mean over the layers of each unit's score, each layer brought to mean 1 first.

        A depthwise convolution has no say where its units have a filter elsewhere: it hands on
        what that filter wrote.
        """
        writers = [w for w in pool.writers if not w.carries] or list(pool.writers)
        if len(writers) == 1 and torch.equal(writers[0].classes, pool.units):
            return self._of_writer(writers[0], rate)
        total = torch.zeros(len(pool.units), dtype=torch.float64)
        order = pool.units.argsort()
        ranked = pool.units[order]
        for writer in writers:
            scores = self._of_writer(writer, rate)
            near = torch.searchsorted(ranked, writer.classes).clamp(max=len(ranked) - 1)
            mine = torch.where(ranked[near] == writer.classes, order[near], -1)
            rows = mine >= 0
            summed = torch.zeros_like(total).index_add(0, mine[rows], scores[rows])
            times = torch.zeros_like(total).index_add(0, mine[rows], torch.ones_like(scores[rows]))
            mean = scores.abs().mean()
            total += summed / times / (mean if len(writers) > 1 and mean > 0 else 1)
        return total

    def _of_writer(self, writer: Writer, rate: float) -> Tensor:
        key = (id(writer), rate)
        if key not in self._known:
            weight = self.tensors[writer.slot.name].detach()
            rows = self._scale_of(writer) if self.uses_scale else writer.filters(weight)
            scorer = self.scorer_of(writer.layer)
            self._known[key] = score(scorer, rows, rate, writer.layer)
        return self._known[key]

    def _scale_of(self, writer: Writer) -> Tensor:
        """|γ| of the norm behind a layer, found as the scale whose classes are the layer's."""
        modules = modules_by_path(self.model)
        for slot in self.structure.seen.slots.values():
            owner = modules.get(slot.name.rpartition(".")[0])
            if slot.trainable and slot.roles == ["scale"] and isinstance(owner, _NORMS):
                own = self.structure.of(slot.fields[0])
                if torch.equal(own, writer.classes):
                    return self.tensors[slot.name].detach()[:, None]
        raise RequestError(
            f"criterion='bn': layer '{writer.layer}' has no norm with a scale behind it; "
            "ignore it or choose another criterion."
        )
