"""Solve for the weights of one layer of a compact model, so that its output matches the original's.

The target is the original layer's output, restricted to the kept channels. If the output is added
to a residual stream, the target is the sum: the layer then also corrects errors that the stream has
from earlier layers. A batch norm in between is a fixed scale and shift, which is inverted.
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
from fpgm.recovery.least_squares import (
    Equations,
    NormalEquations,
    RowEquations,
    add_over_ranks_,
    best_change,
)
from fpgm.recovery.solvable_layers import SolvableLayer
from fpgm.recovery.staged_forward import LayerActivations, PairedForwards
from fpgm.recovery.unfold import LinearOrConv, OutputSample, groups_of, matrix_of, set_matrix_
from fpgm.utils.modules import module_at

RIDGES = (1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
"""In units of the inputs' mean square; the one with the smallest held-out error is taken."""
MIN_GAIN = 1e-3
"""A batch norm whose scale is smaller passes nothing on: its channel is not corrected."""
HELD_OUT_EVERY = 4
"""Every n-th image is held out."""
ROWS_PER_WEIGHT = 64
"""Positions sampled for each weight of a filter: more add little."""
MIN_ROWS = 20_000
MAX_FAN_IN = 8_192
"""Normal equations of a layer with a larger fan-in would take gigabytes."""
WIDE_LAYER_ROWS = 2_048
"""Positions sampled for such a layer."""
MIN_VARIANCE_RATIO = 0.05
"""A running variance is scaled down to this at most, so that no channel is blown up."""


@dataclass(frozen=True)
class SolvedLayer:
    """A layer's squared error before and after, relative to the variance of its target."""

    layer: str
    before: float
    after: float
    ridge: float | None
    """None: no change of the weights reduced the error."""
    note: str | None = None


class LayerSolver:
    """Solves for the weights of one layer."""

    def __init__(
        self, model: nn.Module, small: nn.Module, plan: Plan, passes: PairedForwards, number: int
    ) -> None:
        """Prepare to solve layer `number` of `passes.layers`, in the compact model `small`."""
        self.small, self.passes, self.number = small, passes, number
        self.solvable = passes.layers[number]
        solvable = self.solvable
        self.layer = layer_at(small, solvable.path)
        self.norm = None
        if solvable.batch_norm is not None:
            self.norm = batch_norm_at(small, solvable.batch_norm)
        self.keep = kept_channels(plan, solvable.path, layer_at(model, solvable.path))
        self.has_constant = can_shift_output(small, solvable)

    @torch.no_grad()
    def solve_(self) -> SolvedLayer:
        """Change the layer of the compact model in place."""
        path = self.solvable.path
        matrix = matrix_of(self.layer).double()
        fan_in = matrix.shape[1]
        fit, held_out = self._build_equations(matrix)
        if not fit.count:
            return self._report_unchanged("was not reached by any batch")
        if not fit.squared_residual + held_out.squared_residual:
            return SolvedLayer(path, 0.0, 0.0, None)
        both = fit if held_out is fit else fit.merge(held_out)
        if not math.isfinite(both.squared_residual):
            return self._report_unchanged(
                "has inputs or outputs that are not finite; it is unchanged"
            )
        change, ridge = best_change(fit, held_out, both, RIDGES, self.passes.inputs.ranks)
        variation = both.target_variation()
        set_matrix_(self.layer, (matrix + change[:, :fan_in]).to(self.layer.weight.dtype))
        if self.has_constant:
            shift_output_(self.small, self.solvable, change[:, fan_in].reshape(-1))
        if self.norm is not None and self.solvable.addition is None:
            self._rescale_running_variance_(self.norm, both)
        total = float(variation.sum()) or 1.0
        before, after = both.squared_residual / total, both.error(change) / total
        return SolvedLayer(path, before, after, ridge, self._note(ridge))

    def _report_unchanged(self, why: str) -> SolvedLayer:
        path = self.solvable.path
        return SolvedLayer(path, math.nan, math.nan, None, f"{path} {why}.")

    def _note(self, ridge: float | None) -> str | None:
        if ridge is None or ridge in RIDGES:
            return None
        return f"{self.solvable.path}: its equations were singular and needed a ridge of {ridge:g}."

    def _build_equations(self, matrix: Tensor) -> tuple[Equations, Equations]:
        """Accumulate equations to fit, and held-out ones; all in both if one would be empty."""
        groups, fan_in, outputs = matrix.shape
        wide = fan_in > MAX_FAN_IN
        rows_in_all = max(ROWS_PER_WEIGHT * fan_in, MIN_ROWS)
        if wide:
            rows_in_all = WIDE_LAYER_ROWS // self.solvable.calls
        inputs = self.passes.inputs
        max_positions = -(-rows_in_all // inputs.batches)
        kind: type[Equations] = RowEquations if wide else NormalEquations
        fit, held_out = (
            kind(groups, fan_in, outputs, matrix.device, constant=self.has_constant)
            for _ in range(2)
        )
        for batch, compact, original in self.passes.records_at(self.number):
            number, first = inputs.number_of(batch), inputs.offset_of(batch)
            for sample, targets, out in self._samples(compact, original, max_positions, number):
                is_held_out = (first + sample.images) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
                for part, chosen in ((fit, ~is_held_out), (held_out, is_held_out)):
                    if bool(chosen.any()):
                        target = targets[:, chosen]
                        part.add(sample.rows(chosen), target, target - out[:, chosen])
        add_over_ranks_((fit, held_out), inputs.ranks)
        if fit.count and held_out.count:
            return fit, held_out
        return (fit.merge(held_out),) * 2

    def _samples(
        self,
        compact: LayerActivations,
        original: LayerActivations,
        max_positions: int,
        seed: int,
    ) -> Iterator[tuple[OutputSample, Tensor, Tensor]]:
        """Yield sampled output positions, the target there, and the output there."""
        for x, out, whole in zip(compact.inputs, compact.outputs, original.outputs, strict=True):
            arguments = self.solvable.arguments
            sample = OutputSample(self.layer, x, out, max_positions, seed, arguments)
            target = self._target(sample, compact, original, sample.take(whole))
            own = sample.take(out)
            yield sample, sample.by_group(target).double(), sample.by_group(own).double()

    def _target(
        self,
        sample: OutputSample,
        compact: LayerActivations,
        original: LayerActivations,
        whole: Tensor,
    ) -> Tensor:
        """Compute what the layer should output at the sampled positions: [positions, channels].

        Args:
            sample: the positions.
            compact: what the compact model's layer was given.
            original: what the original's layer was given.
            whole: the original layer's output there, of all its channels.
        """
        output = whole.index_select(1, self.keep)
        addition = self.solvable.addition
        if addition is None or original.sum is None or compact.other_operand is None:
            return output
        if self.solvable.batch_norm is not None and self.norm is None:
            return output  # a batch norm without running statistics cannot be inverted
        other = sample.take(compact.other_operand)
        if addition.channels is not None:
            other = other.index_select(1, torch.tensor(addition.channels, device=other.device))
        target = sample.take(original.sum).index_select(1, self.keep) - other
        return target if self.norm is None else _invert(self.norm, target, output)

    def _rescale_running_variance_(self, norm: _BatchNorm, equations: Equations) -> None:
        """Rescale the following batch norm's running variance: regression shrinks variance."""
        matrix = matrix_of(self.layer).double()
        smallest = torch.finfo(torch.float64).tiny
        ratio = equations.output_variation(matrix) / equations.target_variation().clamp(smallest)
        if norm.running_var is not None:
            norm.running_var.mul_(ratio.clamp(MIN_VARIANCE_RATIO, 1.0).reshape(-1))


def _invert(norm: _BatchNorm, out: Tensor, default: Tensor) -> Tensor:
    """Compute the input with which a batch norm returns `out`; `default` where its scale is 0.

    Channels are the last dim. A scale below `MIN_GAIN` counts as 0.
    """
    gain, shift, mean, var = _norm_tensors(norm)
    invertible = gain.abs() > MIN_GAIN
    scale = (var + norm.eps).sqrt() / torch.where(invertible, gain, 1.0)
    return torch.where(invertible, (out - shift) * scale + mean, default)


def can_shift_output(model: nn.Module, solvable: SolvableLayer) -> bool:
    """Tell whether a constant can be added to a layer's output: it has a bias or a batch norm."""
    norm = None if solvable.batch_norm is None else batch_norm_at(model, solvable.batch_norm)
    return layer_at(model, solvable.path).bias is not None or norm is not None


@torch.no_grad()
def shift_output_(model: nn.Module, solvable: SolvableLayer, constant: Tensor) -> None:
    """Add a constant to a layer's output: to its bias, or subtract it from the running mean."""
    layer = layer_at(model, solvable.path)
    norm = None if solvable.batch_norm is None else batch_norm_at(model, solvable.batch_norm)
    if layer.bias is not None:
        layer.bias.add_(constant.to(layer.bias))
    elif norm is not None and norm.running_mean is not None:
        norm.running_mean.sub_(constant.to(norm.running_mean))


def layer_at(model: nn.Module, path: str) -> LinearOrConv:
    """Return the convolution or linear layer at a path."""
    layer: LinearOrConv = module_at(model, path)  # type: ignore[assignment]
    return layer


def batch_norm_at(model: nn.Module, path: str) -> _BatchNorm | None:
    """Return the batch norm at a path, or None if it has no running statistics."""
    norm = module_at(model, path)
    return norm if isinstance(norm, _BatchNorm) and norm.running_var is not None else None


def _norm_tensors(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scale, shift, mean and variance of a batch norm with running statistics."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    ones, zeros = torch.ones_like(norm.running_var), torch.zeros_like(norm.running_var)
    return (
        ones if norm.weight is None else norm.weight,
        zeros if norm.bias is None else norm.bias,
        norm.running_mean,
        norm.running_var,
    )


def kept_channels(plan: Plan, path: str, layer: LinearOrConv) -> Tensor:
    """Return the original layer's output channels that the compact one still has, in its order."""
    groups, device = groups_of(layer), layer.weight.device
    cuts = {c.dim: c for c in by_tensor(plan.cuts).get(f"{path}.weight", [])}
    if isinstance(layer, _ConvTransposeNd):
        channels = torch.arange(layer.out_channels, device=device).reshape(groups, -1)
        if 1 in cuts:  # some outputs of every group
            keep = torch.tensor(cuts[1].keep, device=device)
            within = keep.reshape(cuts[1].blocks, -1).expand(groups, -1)
            channels = within + cuts[1].size * torch.arange(groups, device=device)[:, None]
        if 0 in cuts and groups > 1:  # entire groups
            rows = torch.tensor(cuts[0].keep, device=device)
            channels = channels[(rows // (layer.in_channels // groups)).unique()]
        return channels.reshape(-1)
    if 0 in cuts:
        return torch.tensor(cuts[0].keep, device=device)
    width = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return torch.arange(width, device=device)
