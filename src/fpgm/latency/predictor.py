"""Predict the latency of a pruned model from the times of its layers.

`Predictor` is for choosing widths: every layer is timed at a few input and output widths, and
interpolated between them. `predict_ratio` is for a compact model: each layer is timed as it is.
Both scale the time outside of layers (norms, activations, additions) with the layers' output sizes,
and that of MACs outside of layers with those MACs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fpgm.latency.lookup_table import LatencyTable
from fpgm.planning.width_rounding import Rounder
from fpgm.tracing.cost_model import Costs, Floats, KeptFractions
from fpgm.tracing.grouping import Structure
from fpgm.tracing.layer_calls import LayerCall, LayerSpec
from fpgm.utils.parameter_roles import PRODUCER_ROLES
from fpgm.utils.progress import Progress

WIDTH_RATIOS = (0.25, 0.5, 0.75, 1.0)
"""Fractions of a layer's width at which it is timed."""
_GRID_STEPS = 16
"""Steps of the interpolated grid along each width."""


@dataclass(frozen=True)
class _LayerRatios:
    """A layer, with the indices of the kept ratios of its input and of its output channels."""

    called: LayerCall
    reads: int
    writes: int


@dataclass(frozen=True)
class TimeParts:
    """A model's seconds, split by what they scale with."""

    scale: float
    """Factor on the layers' times: an isolated layer may take longer than in the model."""
    outputs: float
    """Seconds outside of layers that scale with the layers' output sizes."""
    other_macs: float
    """Seconds of MACs outside of layers, which scale with those MACs."""

    @classmethod
    def of(cls, total: float, layers: float, macs_in_layers: float) -> TimeParts:
        """Split a model's seconds.

        Args:
            total: seconds of the model.
            layers: sum of its layers' seconds.
            macs_in_layers: fraction of its MACs that are in layers.
        """
        rest = max(0.0, total - layers)
        other_macs = rest * max(0.0, 1 - macs_in_layers)
        return cls(min(1.0, total / layers) if layers else 1.0, rest - other_macs, other_macs)


def predict_ratio(
    before: Sequence[LayerCall],
    after: Sequence[LayerCall],
    table: LatencyTable,
    seconds_before: float,
    macs: tuple[int, int],
) -> float:
    """Predict the time of a compact model as a fraction of the original's, from layer times.

    Args:
        before: layers of the original.
        after: layers of the compact model.
        table: times all of them.
        seconds_before: measured time of the original.
        macs: of both models, in layers or not.
    """
    layers_before, layers_after = (
        sum(table.seconds(call.layer) for call in called) for called in (before, after)
    )
    outputs_before, outputs_after = (
        sum(call.given for call in called) for called in (before, after)
    )
    macs_in_layers = sum(call.macs for call in before) / max(1, macs[0])
    parts = TimeParts.of(seconds_before, layers_before, macs_in_layers)
    seconds = parts.scale * layers_after + parts.other_macs * macs[1] / max(1, macs[0])
    return (seconds + parts.outputs * outputs_after / max(1, outputs_before)) / seconds_before


class Predictor:
    """Predicts seconds from the kept fraction of every group; has the interface of `Costs`.

    Args:
        structure: The channel groups of the original.
        called: Its layer calls.
        table: Times layers, or looks their times up.
        total: Measured seconds of the whole original.
        rounder: Rounds widths; only widths it can return are timed.
        progress: Reports progress.
    """

    def __init__(
        self,
        structure: Structure,
        called: Sequence[LayerCall],
        table: LatencyTable,
        total: float,
        rounder: Rounder,
        progress: Progress | None = None,
    ) -> None:
        self._kept_fractions = KeptFractions(structure)
        self._units = [group.units for group in structure.groups]
        layers = [self._find_ratios(structure, call) for call in called]
        grids = []
        for number, layer in enumerate(layers):
            if progress is not None:
                progress(f"timing {layer.called.path}", number, len(layers))
            grids.append(_time_grid(layer.called.layer, table, rounder))
            table.save()
        steps = _GRID_STEPS + 1
        self._grids = np.stack(grids) if grids else np.zeros((0, steps, steps))
        self._reads = np.array([layer.reads for layer in layers], dtype=np.int64)
        self._writes = np.array([layer.writes for layer in layers], dtype=np.int64)
        self._macs = Costs(structure, "macs")
        self._total_macs = max(1, structure.macs())
        macs_in_layers = sum(call.macs for call in called) / self._total_macs
        self._parts = TimeParts.of(total, float(self._grids[:, -1, -1].sum()), macs_in_layers)
        sizes = np.array([float(layer.called.given) for layer in layers])
        self._outputs = self._parts.outputs * sizes / sizes.sum() if len(sizes) else sizes

    def at(self, kept: Floats) -> Floats:
        """Predict seconds from the kept fractions of all groups: [groups] or [many, groups]."""
        fractions = self._kept_fractions.fractions(kept)
        reads, writes = fractions[..., self._reads], fractions[..., self._writes]
        rows = np.arange(len(self._grids))
        total = np.zeros(reads.shape)
        for low_r, weight_r in _corners(reads):
            for low_w, weight_w in _corners(writes):
                total += weight_r * weight_w * self._grids[rows, low_r, low_w]
        other = self._parts.other_macs * self._macs.at(kept) / self._total_macs
        layers = total * self._parts.scale + self._outputs * writes
        return np.asarray(other + layers.sum(axis=-1))

    def without(self, removed: Tensor) -> float:
        """Predict seconds without these units."""
        kept = [1 - float(torch.isin(units, removed).double().mean()) for units in self._units]
        return float(self.at(np.array(kept)))

    def _find_ratios(self, structure: Structure, call: LayerCall) -> _LayerRatios:
        """Find which ratios a layer's widths follow, by its weight or the parameters behind it."""
        sides = {"reads": 0, "writes": 0}
        for info in structure.trace.parameter_infos.values():
            if info.name.startswith(f"{call.path}." if call.path else "") and len(info.shape) > 1:
                for field, role in zip(info.fields, info.roles, strict=True):
                    if role == "reads" or role in PRODUCER_ROLES:
                        side = "reads" if role == "reads" else "writes"
                        sides[side] = self._kept_fractions.number(field)
        if call.layer.depthwise:
            sides["reads"] = sides["writes"]
        return _LayerRatios(call, sides["reads"], sides["writes"])


def _corners(
    ratios: Floats,
) -> list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], Floats]]:
    """Return the grid indices on both sides of a ratio, with their interpolation weights."""
    place = np.clip(ratios, 0.0, 1.0) * _GRID_STEPS
    low = np.minimum(place.astype(np.int64), _GRID_STEPS - 1)
    part = place - low
    return [(low, 1 - part), (low + 1, part)]


def _time_grid(layer: LayerSpec, table: LatencyTable, rounder: Rounder) -> Floats:
    """Time a layer at a few widths, and interpolate seconds for every step of both widths."""
    reads = _widths_to_time(layer.reads, rounder)
    writes = _widths_to_time(layer.writes, rounder)
    if layer.groups > 1 and not layer.depthwise:
        reads = [n for n in reads if n % layer.groups == 0] or [layer.reads]
        writes = [n for n in writes if n % layer.groups == 0] or [layer.writes]
    steps = np.linspace(0, 1, _GRID_STEPS + 1)
    if layer.depthwise:
        times = [table.seconds(layer.with_widths(n, n)) for n in writes]
        line = _interpolate(steps * layer.writes, writes, times)
        return np.repeat(line[None], _GRID_STEPS + 1, axis=0)
    rows = [
        _interpolate(
            steps * layer.writes, writes, [table.seconds(layer.with_widths(r, w)) for w in writes]
        )
        for r in reads
    ]
    columns = np.stack(rows, axis=1)  # [steps of output widths, timed input widths]
    return np.stack(
        [_interpolate(steps * layer.reads, reads, list(times)) for times in columns], axis=1
    )


def _widths_to_time(width: int, rounder: Rounder) -> list[int]:
    """Return the rounded widths at a few fractions of a width."""
    return sorted({rounder.kept_units(width, 1 - ratio) for ratio in WIDTH_RATIOS})


def _interpolate(widths: Floats, timed: Sequence[int], times: Sequence[float]) -> Floats:
    """Interpolate times linearly, and extrapolate below the smallest timed width."""
    seconds = np.interp(widths, timed, times)
    if len(timed) > 1:
        slope = max(0.0, (times[1] - times[0]) / (timed[1] - timed[0]))
        below = widths < timed[0]
        seconds[below] = np.maximum(0.0, times[0] - slope * (timed[0] - widths[below]))
    return np.asarray(seconds)
