"""What every axis of a parameter does, worked out from the uses of what is computed from it.

A convolution names the axes of its own weight at once. A weight that goes through other operators
first (a transpose, a sum of two weights, weight norm) gets its roles here, from the operators that
use the result. An axis that one use writes along and another reads along does `both`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpgm.tracing.constraints import RoleMark, Slot, Sum
from fpgm.tracing.recorder import Watch
from fpgm.utils.parameter_info import Role


def settle_roles(seen: Watch) -> None:
    """Give every axis its final role."""
    uses: dict[tuple[int, int], set[Role]] = {}
    open_slots = [key for key, slot in seen.slots.items() if slot.open]
    sums = _Sums(seen.sums)
    for mark in seen.roles:
        marked = sums.trace(mark)
        for key in mark.slots or open_slots:
            slot = seen.slots[key]
            for i, field in enumerate(slot.fields):
                if bool(torch.isin(field, marked).any()):
                    uses.setdefault((key, i), set()).add(mark.role)
    for (key, i), found in uses.items():
        slot = seen.slots[key]
        slot.roles[i] = _combine(slot.roles[i], found)
    for slot in seen.slots.values():
        _settle_weight_norm(slot)


class _Sums:
    """Sums of parameters, by the parameters they are made of."""

    def __init__(self, sums: Sequence[Sum]) -> None:
        self._sums = sums
        self._by_slot: dict[int, list[int]] = {}
        self._unknown = [number for number, one in enumerate(sums) if not one.slots]
        """Those of which it is not known: they may be anybody's."""
        for number, one in enumerate(sums):
            for key in one.slots:
                self._by_slot.setdefault(key, []).append(number)

    def trace(self, mark: RoleMark) -> Tensor:
        """Return labels of a mark, with those of every term of the sums they are labels of."""
        if len(mark.slots) == 1:
            return mark.labels
        numbers = {n for key in mark.slots for n in self._by_slot.get(key, ())}
        numbers.update(self._unknown)
        marked = mark.labels
        for number in sorted(numbers if mark.slots else range(len(self._sums)), reverse=True):
            one = self._sums[number]
            marked = torch.cat([marked, one.part[torch.isin(one.out, marked)]])
        return marked


def _combine(own: Role, found: set[Role]) -> Role:
    """The role of an axis that plays `own` by itself and `found` in what is computed from it."""
    writes = own in ("filter", "depthwise", "both") or bool(found & {"filter", "both"})
    reads = own in ("reads", "both") or bool(found & {"reads", "both"})
    if writes and reads:
        return "both"
    if own in ("filter", "depthwise", "reads"):
        return own
    if writes:
        return "filter"
    if reads:
        return "reads"
    return "shift" if "shift" in found else own


def _settle_weight_norm(slot: Slot) -> None:
    """Under weight norm the gain is masked, not the direction: its norm must not become zero."""
    for i, (field, role) in enumerate(zip(slot.fields, slot.roles, strict=True)):
        if slot.gain and role == "filter":
            slot.roles[i] = "gain"
        elif slot.norm_axis is not None and field.shape[slot.norm_axis] > 1:
            slot.roles[i] = "direction" if role in ("filter", "both") else "scale"
