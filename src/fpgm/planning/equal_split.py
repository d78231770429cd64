"""Choose how many units to remove where several blocks of channels must shrink equally.

Groups linked by balance constraints form a component. Units that no constraint distinguishes form
a cell, so only the number removed from each cell matters. These numbers solve a small system of
integer equations (equal counts in every block), found by a deterministic local search that starts
from the proportional, feasible but fractional, solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fpgm.criteria import lowest
from fpgm.tracing.grouping import ChannelGroup

Cells = tuple[int, ...]
"""How many units of each cell are removed."""

_TRIES = 40


@dataclass
class Component:
    """Groups that are decided together, and the equations their removed units must satisfy."""

    groups: tuple[ChannelGroup, ...]
    members: list[Tensor]
    cell_group: list[int]
    equations: npt.NDArray[np.int64]
    _solved: dict[tuple[int, ...], Cells] = field(default_factory=dict)

    @property
    def units(self) -> Tensor:
        """Return all units of its groups."""
        return torch.cat([group.units for group in self.groups])

    def solve(self, goals: Sequence[int], limits: Sequence[int]) -> Cells:
        """Find counts per cell as close to the groups' goals as equations and limits allow."""
        key = (*goals, *limits)
        if key not in self._solved:
            self._solved[key] = self._solve(tuple(goals), tuple(limits))
        return self._solved[key]

    def _solve(self, goals: tuple[int, ...], limits: tuple[int, ...]) -> Cells:
        if not len(self.equations):
            return goals
        sizes = np.array([len(m) for m in self.members])
        group_sizes = np.array([len(p.units) for p in self.groups])
        share = np.array(goals) / group_sizes
        ideal = sizes * share[self.cell_group]
        for shrink in (1.0, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2):
            counts = _search(self.equations, sizes, ideal * shrink)
            if counts is not None and self._within(counts, limits):
                return tuple(int(n) for n in counts)
        return (0,) * len(self.members)

    def _within(self, counts: npt.NDArray[np.int64], limits: Sequence[int]) -> bool:
        removed = np.bincount(self.cell_group, counts, len(self.groups))
        return bool(np.all(removed <= np.array(limits)))

    def rate(self, group: ChannelGroup, cells: Cells) -> float:
        """Return the fraction of a group's units that are removed."""
        index = next(i for i, p in enumerate(self.groups) if p is group)
        removed = sum(n for n, p in zip(cells, self.cell_group, strict=True) if p == index)
        return removed / len(group.units)

    def first(self, cells: Cells) -> Tensor:
        """Return any units in these numbers."""
        return torch.cat([m[:n] for m, n in zip(self.members, cells, strict=True)])

    def lowest(self, cells: Cells, scores: Tensor) -> Tensor:
        """Return the lowest-scored units in these numbers; `scores` follow the groups' units."""
        if len(self.members) == 1 and len(self.groups) == 1:
            return self.members[0][lowest(scores, cells[0])]
        order = {c: i for i, c in enumerate(self.units.tolist())}
        chosen = []
        for member, count in zip(self.members, cells, strict=True):
            member_scores = scores[[order[c] for c in member.tolist()]]
            chosen.append(member[lowest(member_scores, count)])
        return torch.cat(chosen)


def components(groups: Sequence[ChannelGroup], balances: Sequence[Tensor]) -> list[Component]:
    """Split the groups into components that can be decided independently."""
    if not balances:
        return [_component([group], []) for group in groups]
    group_of = {c: i for i, group in enumerate(groups) for c in group.units.tolist()}
    root = list(range(len(groups)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    touching: list[list[int]] = []
    for blocks in balances:
        linked = sorted({group_of[c] for c in blocks.reshape(-1).tolist() if c in group_of})
        touching.append(linked)
        for i in linked[1:]:
            root[find(i)] = find(linked[0])
    grouped: dict[int, list[int]] = {}
    for i in range(len(groups)):
        grouped.setdefault(find(i), []).append(i)
    balances_of: dict[int, list[Tensor]] = {}
    for blocks, linked in zip(balances, touching, strict=True):
        if linked:
            balances_of.setdefault(find(linked[0]), []).append(blocks)
    return [
        _component([groups[i] for i in members], balances_of.get(key, []))
        for key, members in grouped.items()
    ]


def _component(groups: Sequence[ChannelGroup], balances: Sequence[Tensor]) -> Component:
    units = torch.cat([p.units for p in groups])
    owner = np.repeat(np.arange(len(groups)), [len(p.units) for p in groups])
    if not balances:
        return Component(
            tuple(groups),
            [p.units for p in groups],
            list(range(len(groups))),
            np.zeros((0, 0), int),
        )
    columns = _columns(units, balances)
    keyed = np.concatenate([owner[None], columns]) if len(columns) else owner[None]
    cells, inverse = np.unique(keyed, axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    members = [units[torch.from_numpy(np.nonzero(inverse == c)[0])] for c in range(cells.shape[1])]
    return Component(tuple(groups), members, [int(p) for p in cells[0]], cells[1:])


def _columns(units: Tensor, balances: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """Build one equation per row: a unit's channels in a block, minus those in the first block."""
    position = {c: i for i, c in enumerate(units.tolist())}
    rows = []
    for blocks in balances:
        counts = np.zeros((blocks.shape[0], len(units)), int)
        for b, row in enumerate(blocks.tolist()):
            for c in row:
                if c in position:
                    counts[b, position[c]] += 1
        rows.append(counts[1:] - counts[:1])
    stacked = np.concatenate(rows)
    return np.unique(stacked[np.any(stacked != 0, axis=1)], axis=0)


def _search(
    equations: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    ideal: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64] | None:
    """Find integers near `ideal`, between 0 and `sizes`, that satisfy the equations."""
    random = np.random.default_rng(0)
    for attempt in range(_TRIES):
        jitter = random.random(len(ideal)) if attempt else 0.5
        counts: npt.NDArray[np.int64] = np.clip(np.floor(ideal + jitter).astype(int), 0, sizes)
        if _descend(equations, sizes, ideal, counts):
            return counts
    return None


def _descend(
    equations: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    ideal: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
) -> bool:
    """Change one or two cells at a time while the equations come closer to holding; in place."""
    steps = np.concatenate([equations, -equations], axis=1)
    cells = len(counts)
    for _ in range(4 * cells + 20):
        gap = equations @ counts
        if not gap.any():
            return True
        room = np.concatenate([counts < sizes, counts > 0])
        drift = np.concatenate([counts + 1 - ideal, ideal - counts + 1])
        single = np.abs(gap[:, None] + steps).sum(0) + 1e-3 * drift
        single[~room] = np.inf
        double = np.abs(gap[:, None, None] + steps[:, :, None] + steps[:, None, :]).sum(0)
        double = double + 1e-3 * (drift[:, None] + drift[None, :])
        double[~room] = np.inf
        double[:, ~room] = np.inf
        # The same cell twice could leave its bounds.
        same = np.arange(2 * cells)
        double[same, same] = np.inf
        now = np.abs(gap).sum()
        if min(single.min(), double.min()) >= now:
            return False
        moves = (
            [int(single.argmin())]
            if single.min() <= double.min()
            else [int(i) for i in np.unravel_index(int(double.argmin()), double.shape)]
        )
        for move in moves:
            counts[move % cells] += 1 if move < cells else -1
    return False
