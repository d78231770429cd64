"""The latency of a pruned model before it is measured: times of its layers at their new widths.

While counts are chosen, every layer's time is known at a few widths of what it reads and what it
writes, and interpolated between them; of a model that was made, each layer is timed as it is. What
a model takes beyond its layers (norms, activations, additions) goes with how much they give out,
and work that is no layer's with its MACs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fpgm.latency.lookup_table import Table
from fpgm.planning.budget import Rounder
from fpgm.tracing.cost_model import Costs, Floats, Shares
from fpgm.tracing.grouping import Structure
from fpgm.tracing.layer_calls import Called, Layer
from fpgm.utils.parameter_info import WRITES
from fpgm.utils.progress import Progress

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of a layer's width at which it is timed."""
_GRID = 16
"""Steps of the interpolated table along each width."""


@dataclass(frozen=True)
class _Entry:
    """A layer, with the numbers of the shares that stay of what it reads and what it writes."""

    called: Called
    reads: int
    writes: int


@dataclass(frozen=True)
class Parts:
    """Seconds of a model by what they go with when it shrinks."""

    scale: float
    """Of the layers' own times: they may take longer alone than all together."""
    given: float
    """Beside layers, going with what they give out."""
    other: float
    """Of work that is no layer's, going with its MACs."""

    @classmethod
    def of(cls, whole: float, layers: float, known: float) -> Parts:
        """From the time of the whole, its layers' together, and the share of MACs in layers."""
        rest = max(0.0, whole - layers)
        other = rest * max(0.0, 1 - known)
        return cls(min(1.0, whole / layers) if layers else 1.0, rest - other, other)


def share_left(
    before: Sequence[Called],
    after: Sequence[Called],
    table: Table,
    whole: float,
    macs: tuple[int, int],
) -> float:
    """Share of a model's time that is left once its layers are others, every one of them timed.

    `macs` are those of the models, layers or not.
    """
    layers, left = (sum(table.seconds(call.layer) for call in own) for own in (before, after))
    given, gives = (sum(call.given for call in own) for own in (before, after))
    parts = Parts.of(whole, layers, sum(call.macs for call in before) / max(1, macs[0]))
    seconds = parts.scale * left + parts.other * macs[1] / max(1, macs[0])
    return (seconds + parts.given * gives / max(1, given)) / whole


class Predictor:
    """Seconds of the model when a share of every pool stays; same use as `Costs`."""

    def __init__(
        self,
        structure: Structure,
        called: Sequence[Called],
        table: Table,
        whole: float,
        rounder: Rounder,
        progress: Progress | None = None,
    ) -> None:
        self._shares = Shares(structure)
        self._units = [pool.units for pool in structure.pools]
        entries = [self._entry(structure, call) for call in called]
        grids = []
        for number, entry in enumerate(entries):
            if progress is not None:
                progress(f"timing {entry.called.path}", number, len(entries))
            grids.append(_grid(entry.called.layer, table, rounder))
            table.save()
        self._grids = np.stack(grids) if grids else np.zeros((0, _GRID + 1, _GRID + 1))
        self._reads = np.array([entry.reads for entry in entries], dtype=np.int64)
        self._writes = np.array([entry.writes for entry in entries], dtype=np.int64)
        self._work = Costs(structure, "macs")
        self._all_work = max(1, structure.macs())
        known = sum(call.macs for call in called) / self._all_work
        self._parts = Parts.of(whole, float(self._grids[:, -1, -1].sum()), known)
        given = np.array([float(entry.called.given) for entry in entries])
        self._beside = self._parts.given * given / given.sum() if len(given) else given

    def at(self, kept: Floats) -> Floats:
        """Seconds where these shares of each pool stay: [pools] or [many, pools]."""
        shares = self._shares.of(kept)
        reads, writes = shares[..., self._reads], shares[..., self._writes]
        rows = np.arange(len(self._grids))
        total = np.zeros(reads.shape)
        for low_r, weight_r in _corners(reads):
            for low_w, weight_w in _corners(writes):
                total += weight_r * weight_w * self._grids[rows, low_r, low_w]
        other = self._parts.other * self._work.at(kept) / self._all_work
        layers = total * self._parts.scale + self._beside * writes
        return np.asarray(other + layers.sum(axis=-1))

    def without(self, removed: Tensor) -> float:
        """Seconds once these classes are gone."""
        kept = [1 - float(torch.isin(units, removed).double().mean()) for units in self._units]
        return float(self.at(np.array(kept)))

    def _entry(self, structure: Structure, call: Called) -> _Entry:
        """By what is known of the layer's own tensors: its weight, or what that is made of."""
        sides = {"reads": 0, "writes": 0}
        for slot in structure.seen.slots.values():
            if slot.name.startswith(f"{call.path}." if call.path else "") and len(slot.shape) > 1:
                for field, role in zip(slot.fields, slot.roles, strict=True):
                    if role == "reads" or role in WRITES:
                        side = "reads" if role == "reads" else "writes"
                        sides[side] = self._shares.number(field)
        if call.layer.depthwise:
            sides["reads"] = sides["writes"]
        return _Entry(call, sides["reads"], sides["writes"])


def _corners(
    shares: Floats,
) -> list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], Floats]]:
    """Places in the table on both sides of a share, and how much each of them counts."""
    place = np.clip(shares, 0.0, 1.0) * _GRID
    low = np.minimum(place.astype(np.int64), _GRID - 1)
    part = place - low
    return [(low, 1 - part), (low + 1, part)]


def _grid(layer: Layer, table: Table, rounder: Rounder) -> Floats:
    """Seconds at every step of both widths, from measurements at a few."""
    reads, writes = _widths(layer.reads, rounder), _widths(layer.writes, rounder)
    if layer.groups > 1 and not layer.depthwise:
        reads = [n for n in reads if n % layer.groups == 0] or [layer.reads]
        writes = [n for n in writes if n % layer.groups == 0] or [layer.writes]
    steps = np.linspace(0, 1, _GRID + 1)
    if layer.depthwise:
        times = [table.seconds(layer.sized(n, n)) for n in writes]
        line = _line(steps * layer.writes, writes, times)
        return np.repeat(line[None], _GRID + 1, axis=0)
    rows = [
        _line(steps * layer.writes, writes, [table.seconds(layer.sized(r, w)) for w in writes])
        for r in reads
    ]
    columns = np.stack(rows, axis=1)  # [writes' steps, reads measured]
    return np.stack([_line(steps * layer.reads, reads, list(own)) for own in columns], axis=1)


def _widths(width: int, rounder: Rounder) -> list[int]:
    """Widths worth measuring: what the rounder would make of a few shares."""
    return sorted({rounder.kept(width, 1 - share) for share in SHARES})


def _line(places: Floats, known: Sequence[int], values: Sequence[float]) -> Floats:
    """Straight lines between what is known, and from the two smallest on towards nothing."""
    found = np.interp(places, known, values)
    if len(known) > 1:
        slope = max(0.0, (values[1] - values[0]) / (known[1] - known[0]))
        below = places < known[0]
        found[below] = np.maximum(0.0, values[0] - slope * (known[0] - places[below]))
    return np.asarray(found)
