"""Equal shares: choosing counts when several blocks of channels must shrink alike.

Pools linked by balance constraints form a component. Units that no constraint can tell apart form
a cell, so only the number removed from each cell matters; those numbers solve a small system of
integer equations (as many removed here as there), by a deterministic local search from the
proportional, always feasible but fractional, answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fpgm.criteria import lowest
from fpgm.tracing.grouping import Pool

Cells = tuple[int, ...]
"""How many units of each cell go."""

_TRIES = 40


@dataclass
class Component:
    """Pools that are decided together, and the equations their removed units must satisfy."""

    pools: tuple[Pool, ...]
    members: list[Tensor]
    cell_pool: list[int]
    equations: npt.NDArray[np.int64]
    _solved: dict[tuple[int, ...], Cells] = field(default_factory=dict)

    @property
    def units(self) -> Tensor:
        """All units of its pools."""
        return torch.cat([pool.units for pool in self.pools])

    def solve(self, goals: Sequence[int], limits: Sequence[int]) -> Cells:
        """Removed per cell: as near to the goals per pool as the equations and limits allow."""
        key = (*goals, *limits)
        if key not in self._solved:
            self._solved[key] = self._solve(tuple(goals), tuple(limits))
        return self._solved[key]

    def _solve(self, goals: tuple[int, ...], limits: tuple[int, ...]) -> Cells:
        if not len(self.equations):
            return goals
        sizes = np.array([len(m) for m in self.members])
        pool_sizes = np.array([len(p.units) for p in self.pools])
        share = np.array(goals) / pool_sizes
        ideal = sizes * share[self.cell_pool]
        for shrink in (1.0, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2):
            found = _search(self.equations, sizes, ideal * shrink)
            if found is not None and self._within(found, limits):
                return tuple(int(n) for n in found)
        return (0,) * len(self.members)

    def _within(self, counts: npt.NDArray[np.int64], limits: Sequence[int]) -> bool:
        gone = np.bincount(self.cell_pool, counts, len(self.pools))
        return bool(np.all(gone <= np.array(limits)))

    def rate(self, pool: Pool, cells: Cells) -> float:
        """Share of a pool's units that go."""
        index = next(i for i, p in enumerate(self.pools) if p is pool)
        gone = sum(n for n, p in zip(cells, self.cell_pool, strict=True) if p == index)
        return gone / len(pool.units)

    def first(self, cells: Cells) -> Tensor:
        """Some units in these numbers."""
        return torch.cat([m[:n] for m, n in zip(self.members, cells, strict=True)])

    def lowest(self, cells: Cells, scores: Tensor) -> Tensor:
        """The lowest-scored units in these numbers; `scores` follow the pools' units in order."""
        if len(self.members) == 1 and len(self.pools) == 1:
            return self.members[0][lowest(scores, cells[0])]
        order = {c: i for i, c in enumerate(self.units.tolist())}
        chosen = []
        for member, count in zip(self.members, cells, strict=True):
            own = scores[[order[c] for c in member.tolist()]]
            chosen.append(member[lowest(own, count)])
        return torch.cat(chosen)


def components(pools: Sequence[Pool], balances: Sequence[Tensor]) -> list[Component]:
    """Split the pools into parts that can be decided apart."""
    if not balances:
        return [_component([pool], []) for pool in pools]
    pool_of = {c: i for i, pool in enumerate(pools) for c in pool.units.tolist()}
    root = list(range(len(pools)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    touching: list[list[int]] = []
    for blocks in balances:
        linked = sorted({pool_of[c] for c in blocks.reshape(-1).tolist() if c in pool_of})
        touching.append(linked)
        for i in linked[1:]:
            root[find(i)] = find(linked[0])
    grouped: dict[int, list[int]] = {}
    for i in range(len(pools)):
        grouped.setdefault(find(i), []).append(i)
    own: dict[int, list[Tensor]] = {}
    for blocks, linked in zip(balances, touching, strict=True):
        if linked:
            own.setdefault(find(linked[0]), []).append(blocks)
    return [
        _component([pools[i] for i in members], own.get(key, []))
        for key, members in grouped.items()
    ]


def _component(pools: Sequence[Pool], balances: Sequence[Tensor]) -> Component:
    units = torch.cat([p.units for p in pools])
    owner = np.repeat(np.arange(len(pools)), [len(p.units) for p in pools])
    if not balances:
        return Component(
            tuple(pools), [p.units for p in pools], list(range(len(pools))), np.zeros((0, 0), int)
        )
    columns = _columns(units, balances)
    keyed = np.concatenate([owner[None], columns]) if len(columns) else owner[None]
    cells, inverse = np.unique(keyed, axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    members = [units[torch.from_numpy(np.nonzero(inverse == c)[0])] for c in range(cells.shape[1])]
    return Component(tuple(pools), members, [int(p) for p in cells[0]], cells[1:])


def _columns(units: Tensor, balances: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """One equation a row: how many of a unit's channels lie in a block, less those in the first."""
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
    """Integers near `ideal`, between 0 and `sizes`, that satisfy the equations."""
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
    """Change one or two cells at a time while the equations come nearer to holding; in place."""
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
