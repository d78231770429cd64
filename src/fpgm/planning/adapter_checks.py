"""Check in a dry run that adapters of earlier plans still move the channels they should.

This part of the `ValidatingTracer` compares what an adapter moves in the compact model with what
the labels predicted. A gather whose channels arrive in a different order gets new positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fpgm.tracing import labels as lb
from fpgm.tracing.grouping import Structure
from fpgm.tracing.trace_values import Move, Place
from fpgm.tracing.tracer import Tracer
from fpgm.utils.adapter_spec import Adapter, Side


class AdapterChecks(Tracer):
    """A tracer that checks what adapters move."""

    structure: Structure
    kept: Tensor

    def _misaligned_error(self, fields: Sequence[Tensor], where: str = "") -> Exception:
        """Return the error that these labels do not line up."""
        raise NotImplementedError

    def _mark_unordered(self, *fields: Tensor) -> None:
        """Note labels whose order is not known."""
        raise NotImplementedError

    def _positions(self, have: list[int], wanted: list[int]) -> list[int] | None:
        """Return where each wanted label is."""
        raise NotImplementedError

    def _add_adapter(self, adapter: Adapter, have: Tensor, wanted: Tensor) -> None:
        """Add an adapter to the plan."""
        raise NotImplementedError

    def handles_adapter(self, adapter: Adapter) -> bool:
        """Tell whether an adapter is of an earlier plan; those of the new plan run as operators."""
        return self._key_of(adapter) in self.structure.trace.moves

    def _key_of(self, adapter: Adapter) -> tuple[Place, Side]:
        return self.current_call(adapter.module), adapter.side

    def place(self, adapter: Adapter, labels: Tensor | None, zero: bool) -> tuple[Tensor, Tensor]:
        move = self.structure.trace.moves[self._key_of(adapter)]
        assert move.stream is not None
        return self._expect(labels, move), move.stream

    def pick(self, adapter: Adapter, labels: Tensor | None, wide: Tensor | None) -> Tensor:
        return self._expect(labels, self.structure.trace.moves[self._key_of(adapter)])

    def carry_through_adapter(self, adapter: Adapter, x: Tensor, out: Tensor) -> Tensor | None:
        changed = self._reordered_gather(adapter, x)
        if changed is None:
            return super().carry_through_adapter(adapter, x, out)
        out = x.index_select(adapter.dim, torch.tensor(changed.index, device=x.device))
        super().carry_through_adapter(changed, x, out)
        return out

    def _reordered_gather(self, adapter: Adapter, x: Tensor) -> Adapter | None:
        """Return a gather of the same channels, if their order has changed."""
        move = self.structure.trace.moves[self._key_of(adapter)]
        rows = [f.reshape(-1) for f in self.fields(x) if lb.axes(f) == [adapter.dim]]
        if move.wide is None or len(rows) != 1:
            return None
        row, wanted = rows[0], move.labels[self.kept[move.labels]]
        have = row[[i for i in adapter.index if i < len(row)]]
        if torch.equal(have, wanted):
            return None
        index = self._positions(row.tolist(), wanted.tolist())
        if index is None:
            raise self._misaligned_error([have, wanted])
        new = replace(adapter, index=tuple(index), size=len(row))
        self._add_adapter(new, have, wanted)
        return new

    def _expect(self, have: Tensor | None, move: Move) -> Tensor:
        """Return the labels an adapter should move, after comparing them with those it moves."""
        wanted = move.labels[self.kept[move.labels]]
        if have is None:
            if len(wanted) > 1:
                self._mark_unordered(wanted)
        elif len(have) != len(wanted):
            raise self._misaligned_error([have, wanted])
        else:
            self.relate(have, wanted)
        return wanted
