"""Checking in a dry run that adapters of earlier plans still move the channels they should.

The part of the `Checker` that compares what an adapter moves in the compact model with what the
labels predicted. A gather whose channels come in another order gets other positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.constraints import Move, Place
from fpgm.tracing.grouping import Structure
from fpgm.tracing.tracer import Tracer
from fpgm.utils.adapter_spec import Adapter, Side


class AdapterChecks(Tracer):
    """A tracer that checks what adapters move."""

    structure: Structure
    kept: Tensor

    def _clash(self, fields: Sequence[Tensor], where: str = "") -> Exception:
        """Return the error that these labels do not line up."""
        raise NotImplementedError

    def _lose(self, *fields: Tensor) -> None:
        """Note labels whose order is not known."""
        raise NotImplementedError

    def _positions(self, have: list[int], wanted: list[int]) -> list[int] | None:
        """Return where each wanted label is."""
        raise NotImplementedError

    def _add(self, adapter: Adapter, have: Tensor, wanted: Tensor) -> None:
        """Let the plan have an adapter."""
        raise NotImplementedError

    def knows(self, adapter: Adapter) -> bool:
        """Tell whether an adapter is an earlier plan's: what the new plan adds is followed."""
        return self._key_of(adapter) in self.structure.seen.moves

    def _key_of(self, adapter: Adapter) -> tuple[Place, Side]:
        return self.here(adapter.module), adapter.side

    def place(self, adapter: Adapter, labels: Tensor | None, zero: bool) -> tuple[Tensor, Tensor]:
        move = self.structure.seen.moves[self._key_of(adapter)]
        assert move.stream is not None
        return self._expect(labels, move), move.stream

    def pick(self, adapter: Adapter, labels: Tensor | None, wide: Tensor | None) -> Tensor:
        return self._expect(labels, self.structure.seen.moves[self._key_of(adapter)])

    def adapted(self, adapter: Adapter, x: Tensor, out: Tensor) -> Tensor | None:
        changed = self._reordered(adapter, x)
        if changed is None:
            return super().adapted(adapter, x, out)
        out = x.index_select(adapter.dim, torch.tensor(changed.index, device=x.device))
        super().adapted(changed, x, out)
        return out

    def _reordered(self, adapter: Adapter, x: Tensor) -> Adapter | None:
        """Return a gather of the same channels, if they come in another order than before."""
        move = self.structure.seen.moves[self._key_of(adapter)]
        rows = [f.reshape(-1) for f in self.fields(x) if lb.axes(f) == [adapter.dim]]
        if move.wide is None or len(rows) != 1:
            return None
        row, wanted = rows[0], move.labels[self.kept[move.labels]]
        have = row[[i for i in adapter.index if i < len(row)]]
        if torch.equal(have, wanted):
            return None
        index = self._positions(row.tolist(), wanted.tolist())
        if index is None:
            raise self._clash([have, wanted])
        new = replace(adapter, index=tuple(index), size=len(row))
        self._add(new, have, wanted)
        return new

    def _expect(self, have: Tensor | None, move: Move) -> Tensor:
        """Return the labels an adapter should move, checked against those it does."""
        wanted = move.labels[self.kept[move.labels]]
        if have is None:
            if len(wanted) > 1:
                self._lose(wanted)
        elif len(have) != len(wanted):
            raise self._clash([have, wanted])
        else:
            self.relate(have, wanted)
        return wanted
