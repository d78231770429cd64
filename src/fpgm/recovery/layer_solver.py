"""One layer of a compact model: what it should have written, and the weights that come nearest.

What it should have written is what the original writes there, as far as its channels are kept. If
the layer's output is added to a stream, it is the sum that has to come out right: the layer makes
up for what the stream has lost before. The batch norm between is a fixed scale and shift, undone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd

from fpgm.pruning.plan import Plan
from fpgm.pruning.slicing import by_tensor
from fpgm.recovery.least_squares import Equations, Few, Normal, best_change
from fpgm.recovery.solvable_layers import Site
from fpgm.recovery.staged_forward import Seen, Walks
from fpgm.recovery.unfold import Layer, Sample, groups_of, matrix_of, set_matrix_
from fpgm.utils.modules import module_at

RIDGES = (1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
"""Tried in turn, in units of what the layer reads; held-out data show which serves best."""
FAINT = 1e-3
"""A norm's scale below this lets nothing through that could be made up for."""
HELD_OUT = 4
"""One picture in so many is held out."""
ROWS_PER_WEIGHT = 64
"""So many positions are drawn for every weight of a filter: more tell little more."""
LEAST_ROWS = 20_000
MOST_READS = 8_192
"""Normal equations of a layer that reads more at once would take gigabytes."""
FEW = 2_048
"""Of such a layer so many rows are looked at."""
LEAST_SHARE = 0.05
"""A channel that can hardly be told from the others is not blown up beyond this."""


@dataclass(frozen=True)
class Solved:
    """A layer's squared error before and after, as shares of the variance there."""

    layer: str
    before: float
    after: float
    ridge: float | None
    """None: the weights were best left as they are."""
    note: str | None = None


class LayerWork:
    """Solving for one layer."""

    def __init__(
        self, model: nn.Module, small: nn.Module, plan: Plan, walks: Walks, number: int
    ) -> None:
        self.small, self.walks, self.number = small, walks, number
        self.site = walks.sites[number]
        site = self.site
        self.layer = layer_at(small, site.layer)
        self.norm = None if site.norm is None else norm_at(small, site.norm)
        self.keep = kept_channels(plan, site.layer, layer_at(model, site.layer))
        self.dim = -1 if isinstance(self.layer, nn.Linear) else 1
        self.has_constant = shiftable(small, site)

    @torch.no_grad()
    def solve_(self) -> Solved:
        """Change the layer of the compact model, in place."""
        matrix = matrix_of(self.layer).double()
        reads = matrix.shape[1]
        fit, held = self._equations(matrix)
        if not fit.count:
            return self._left("was not reached")
        if not fit.missed + held.missed:
            return Solved(self.site.layer, 0.0, 0.0, None)
        both = fit if held is fit else fit.join(held)
        if not math.isfinite(both.missed):
            return self._left("reads or should write what is not finite; it stays as it is")
        change, ridge = best_change(fit, held, both, RIDGES)
        spread = both.spread()
        set_matrix_(self.layer, (matrix + change[:, :reads]).to(self.layer.weight.dtype))
        if self.has_constant:
            shift_(self.small, self.site, change[:, reads].reshape(-1))
        if self.norm is not None and self.site.sum is None:
            self._restore_spread_(self.norm, both)
        whole = float(spread.sum()) or 1.0
        before, after = both.missed / whole, both.error(change) / whole
        return Solved(self.site.layer, before, after, ridge, self._note(ridge))

    def _left(self, why: str) -> Solved:
        """Left as it is."""
        return Solved(self.site.layer, math.nan, math.nan, None, f"{self.site.layer} {why}.")

    def _note(self, ridge: float | None) -> str | None:
        if ridge is None or ridge in RIDGES:
            return None
        return f"{self.site.layer}: its equations were singular and needed a ridge of {ridge:g}."

    def _equations(self, matrix: Tensor) -> tuple[Equations, Equations]:
        """Normal equations of what is fitted and of what is held out; the same if that is all."""
        groups, reads, writes = matrix.shape
        wide = reads > MOST_READS
        rows_in_all = FEW // self.site.calls if wide else max(ROWS_PER_WEIGHT * reads, LEAST_ROWS)
        most = -(-rows_in_all // len(self.walks.inputs))
        kind: type[Equations] = Few if wide else Normal
        fit, held = (
            kind(groups, reads, writes, matrix.device, constant=self.has_constant) for _ in range(2)
        )
        first = 0
        for batch, mine, theirs in self.walks.at(self.number):
            for sample, wanted, written in self._samples(mine, theirs, most, batch):
                rows = sample.rows().double()
                apart = (first + sample.pictures) % HELD_OUT == HELD_OUT - 1
                for part, chosen in ((fit, ~apart), (held, apart)):
                    if bool(chosen.any()):
                        own = wanted[:, chosen]
                        part.add(rows[:, chosen], own, own - written[:, chosen])
            first += mine.inputs[0].shape[0]
        return (fit, held) if fit.count and held.count else (fit.join(held),) * 2

    def _samples(
        self, mine: Seen, theirs: Seen, most: int, seed: int
    ) -> Iterator[tuple[Sample, Tensor, Tensor]]:
        """Places of the layer's output, what it should write there, and what it writes."""
        for x, out, target in zip(
            mine.inputs, mine.outputs, self._wanted(mine, theirs), strict=True
        ):
            sample = Sample(self.layer, x, out, most, seed)
            yield sample, sample.values(target).double(), sample.values(out).double()

    def _wanted(self, mine: Seen, theirs: Seen) -> list[Tensor]:
        """What the layer should have written, call by call."""
        plain = [out.index_select(self.dim, self.keep) for out in theirs.outputs]
        if self.site.sum is None or theirs.total is None or mine.other is None:
            return plain
        if self.site.norm is not None and self.norm is None:
            return plain  # a norm without statistics of its own cannot be undone
        other = mine.other
        if self.site.sum.places is not None:
            places = torch.tensor(self.site.sum.places, device=other.device)
            other = other.index_select(self.dim, places)
        missing = theirs.total.index_select(self.dim, self.keep) - other
        return [missing if self.norm is None else self._before(self.norm, missing, plain[0])]

    def _before(self, norm: _BatchNorm, out: Tensor, plain: Tensor) -> Tensor:
        """What a norm must be given to return `out`; where it lets nothing through, `plain`."""
        shape = [1] * out.ndim
        shape[self.dim] = -1
        gain, shift, mean, var = (t.reshape(shape) for t in _statistics(norm))
        audible = gain.abs() > FAINT
        scale = (var + norm.eps).sqrt() / torch.where(audible, gain, 1.0)
        return torch.where(audible, (out - shift) * scale + mean, plain)

    def _restore_spread_(self, norm: _BatchNorm, seen: Equations) -> None:
        """What is fitted varies less than what it was fitted to; its norm makes up for that."""
        matrix = matrix_of(self.layer).double()
        share = seen.variance(matrix) / seen.spread().clamp(min=torch.finfo(torch.float64).tiny)
        if norm.running_var is not None:
            norm.running_var.mul_(share.clamp(LEAST_SHARE, 1.0).reshape(-1))


def shiftable(model: nn.Module, site: Site) -> bool:
    """Whether a constant can be added to what a layer writes."""
    norm = None if site.norm is None else norm_at(model, site.norm)
    return layer_at(model, site.layer).bias is not None or norm is not None


@torch.no_grad()
def shift_(model: nn.Module, site: Site, constant: Tensor) -> None:
    """Add a constant to what a layer writes: to its bias, or out of the mean its norm subtracts."""
    layer = layer_at(model, site.layer)
    norm = None if site.norm is None else norm_at(model, site.norm)
    if layer.bias is not None:
        layer.bias.add_(constant.to(layer.bias))
    elif norm is not None and norm.running_mean is not None:
        norm.running_mean.sub_(constant.to(norm.running_mean))


def layer_at(model: nn.Module, path: str) -> Layer:
    """A layer by its path."""
    layer: Layer = module_at(model, path)  # type: ignore[assignment]
    return layer


def norm_at(model: nn.Module, path: str) -> _BatchNorm | None:
    """A batch norm by its path, if it has statistics of its own to work with."""
    norm = module_at(model, path)
    return norm if isinstance(norm, _BatchNorm) and norm.running_var is not None else None


def _statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale, shift, mean and variance of a norm that has running statistics."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    ones, zeros = torch.ones_like(norm.running_var), torch.zeros_like(norm.running_var)
    return (
        ones if norm.weight is None else norm.weight,
        zeros if norm.bias is None else norm.bias,
        norm.running_mean,
        norm.running_var,
    )


def kept_channels(plan: Plan, path: str, layer: Layer) -> Tensor:
    """Which of the original layer's channels the compact one still writes, in its order."""
    groups, device = groups_of(layer), layer.weight.device
    cuts = {c.dim: c for c in by_tensor(plan.cuts).get(f"{path}.weight", [])}
    if isinstance(layer, _ConvTransposeNd):
        each = torch.arange(layer.out_channels, device=device).reshape(groups, -1)
        if 1 in cuts:  # of every group some outputs
            keep = torch.tensor(cuts[1].keep, device=device)
            own = keep.reshape(cuts[1].blocks, -1).expand(groups, -1)
            each = own + cuts[1].size * torch.arange(groups, device=device)[:, None]
        if 0 in cuts and groups > 1:  # whole groups
            rows = torch.tensor(cuts[0].keep, device=device)
            each = each[(rows // (layer.in_channels // groups)).unique()]
        return each.reshape(-1)
    if 0 in cuts:
        return torch.tensor(cuts[0].keep, device=device)
    width = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return torch.arange(width, device=device)
