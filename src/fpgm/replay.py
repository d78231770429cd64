"""Replaying a compact model with labels: does the user's own code follow the smaller sizes?

The same rules run again, on the compact model, with every weight carrying the classes it kept. Now
two labels that meet must be equal, sizes must be as predicted, and a module must return its
channels in the predicted order. Constants in user code (`view(-1, 9216)`, `split(x, 64)`) show up
here as a mismatch at a known place; a mere change of order at a module's output is mended by a
gather there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fpgm import labels as lb
from fpgm.compact import by_tensor, compact, cut, named_tensors
from fpgm.coupling import Structure
from fpgm.examples import Example
from fpgm.plan import Adapter, Plan
from fpgm.watch import Factor, Place, RuleFault, Slot, Tracer, undisturbed

_HEAVY = {"aten::convolution", "aten::addmm", "aten::mm", "aten::bmm"}


class Mismatch(Exception):
    """The compact model does not do what the labels say; carries the classes involved."""

    def __init__(
        self, reason: str, classes: Sequence[Tensor], place: tuple[Place, int] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.classes = (
            torch.cat([c.reshape(-1) for c in classes]) if classes else torch.zeros(0).long()
        )
        self.place = place


class Replay(Tracer):
    """A tracer that checks instead of collecting."""

    trusts_positions = True

    def __init__(
        self, small: nn.Module, structure: Structure, plan: Plan, removed: Tensor
    ) -> None:
        super().__init__(small, _kept_slots(small, structure, plan))
        self.structure = structure
        self.kept = structure.kept_labels(removed)
        self.adapters: dict[str, Adapter] = {}
        self._latest: list[Tensor] = []
        self._branches = {site.module: site.labels for site in structure.seen.sites}
        self._pickers = {site.module: site.labels for site in structure.seen.picks}
        self._scattered: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            heavy = func._schema.name in _HEAVY
            out = _only_shape(func, args, kwargs) if heavy else super().call(func, args, kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._mismatch(_fixed(error), args, self.next_risk()) from None
        if isinstance(out, Tensor):
            self._latest = [out, *self._latest[:1]]
        return out

    def _mismatch(
        self, reason: str, tensors: Sequence[Any], place: tuple[Place, int] | None = None
    ) -> Mismatch:
        fields = [f for t in tensors if isinstance(t, Tensor) for f in self.fields(t)[:1]]
        return Mismatch(f"{reason} in {self.where()}", fields, place)

    def outside(self, error: Exception) -> Mismatch:
        """An error raised by user code between operators: blame what was computed last."""
        return self._mismatch(_fixed(error), self._latest)

    def fresh(self, count: int) -> Tensor:
        return torch.full((count,), lb.ANY)

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a == lb.ANY, b, a)

    def relate(self, a: Tensor, b: Tensor) -> None:
        try:
            a, b = torch.broadcast_tensors(a, b)
        except RuntimeError:
            raise self._clash([a, b]) from None
        if not bool(((a == b) | (a == lb.ANY) | (b == lb.ANY)).all()):
            raise self._clash([a, b])

    def _clash(self, fields: Sequence[Tensor]) -> Mismatch:
        reason = f"channels would not line up after pruning in {self.where()}"
        return Mismatch(reason, fields)

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        """What had to be frozen was frozen when watching."""

    def window(self, dim: int, labels: Tensor) -> bool:
        return True

    def risky(self, out: Tensor, source: Tensor | None) -> None:
        place = self.next_risk()
        expected = self.structure.seen.risks.get(place)
        if expected is None or self._predicted_shape(expected.out) == tuple(out.shape):
            return
        raise Mismatch(
            f"a size is fixed in the code in {self.where()}",
            [self.structure.of(f) for f in expected.out.fields],
            place,
        )

    def _predicted_shape(self, expected: Factor) -> tuple[int, ...]:
        shape = list(expected.shape)
        for f in expected.fields:
            stays = self.kept[f]
            main = lb.varying_dim(f, lb.axes(f))
            for d in lb.axes(f):
                if d == main:  # blocks keep equally many, though not the same ones
                    shape[d] = int(stays.sum(d).max())
                else:
                    shape[d] = int(stays.any([o for o in range(f.ndim) if o != d]).sum())
        return tuple(shape)

    def passed(self, x: Tensor, out: Tensor) -> None:
        if x in self._scattered and out is not x:
            self._scattered[out] = self._scattered[x]

    def picked(self, x: Tensor, out: Tensor) -> None:
        if self.module in self._pickers and x in self._scattered:
            self.set(out, [lb.along(self._scattered[x], out.ndim, 1)])

    def reading(self, x: Tensor, weight: Tensor, row: Tensor | None) -> Tensor | None:
        """Nothing was cut from a whole branch, so nothing is picked, but it is read as one."""
        if self.module in self._pickers and x in self._scattered:
            return self._scattered[x]  # type: ignore[no-any-return]
        return row

    def _enter_stream(self, path: str, out: Tensor, expected: Factor) -> Tensor | None:
        """A branch left its module: from here on its channels are the stream's."""
        if tuple(out.shape) != expected.shape:
            raise self._clash([self.structure.of(self._branches[path])])
        handed = torch.ops.aten.alias(out)
        self.set(handed, [self.structure.of(f) for f in expected.fields])
        labels = self._branches[path]
        self._scattered[handed] = self.structure.of(labels[self.kept[labels]])
        return handed

    def returned(self, path: str, out: Any) -> Any:
        expected = self.structure.seen.returns.get(self.here(path))
        if expected is None or not isinstance(out, Tensor) or len(expected.fields) != 1:
            return None
        if path in self._branches:
            return self._enter_stream(path, out, expected)
        field = expected.fields[0]
        used = lb.axes(field)
        own = [f for f in self.fields(out) if lb.axes(f) == used]
        if len(used) != 1 or len(own) != 1:
            return None
        wanted = self.structure.of(field.reshape(-1)[self.kept[field.reshape(-1)]])
        have = own[0].reshape(-1)
        if wanted.shape == have.shape and bool(((have == wanted) | (have == lb.ANY)).all()):
            return None
        return self._mend(path, out, used[0], have, wanted)

    def _mend(self, path: str, out: Tensor, dim: int, have: Tensor, wanted: Tensor) -> Tensor:
        """Pick the predicted channels, in the predicted order, out of what the module returns."""
        index = _positions(have.tolist(), wanted.tolist())
        if index is None:
            raise self._clash([have, wanted])
        adapter = Adapter(path, "output", "gather", dim, tuple(index), len(have))
        if self.adapters.setdefault(path, adapter) != adapter or not path:
            raise self._clash([have, wanted])
        picked = out.index_select(dim, torch.tensor(index, device=out.device))
        self.set(picked, [lb.along(wanted, out.ndim, dim)])
        return picked


def replay(
    model: nn.Module,
    structure: Structure,
    plan: Plan,
    removed: Tensor,
    examples: Sequence[Example],
) -> list[Adapter]:
    """Run the compact model on every example; returns the gathers it needs, or raises `Mismatch`."""
    small = compact(model, plan, values=False)
    checker = Replay(small, structure, plan, removed)
    with undisturbed(small):
        small.eval()
        for example in examples:
            try:
                checker.run(example)
            except (Mismatch, RuleFault):
                raise
            except Exception as error:
                raise checker.outside(error) from error
    return list(checker.adapters.values())


def _positions(have: list[int], wanted: list[int]) -> list[int] | None:
    """Where each wanted class stands; constants (padding) may stand for any class not found."""
    places: dict[int, list[int]] = {}
    for i, c in enumerate(have):
        places.setdefault(c, []).append(i)
    spare = places.pop(lb.ANY, [])
    found = []
    for c in wanted:
        pool = places.get(c) or spare
        if not pool:
            return None
        found.append(pool.pop(0))
    return found


def _kept_slots(small: nn.Module, structure: Structure, plan: Plan) -> dict[int, Slot]:
    """The slots of the compact model, labelled with the classes that stayed."""
    cuts = by_tensor(plan.cuts)
    tensors = named_tensors(small)
    slots = {}
    for slot in structure.seen.slots.values():
        tensor = tensors[slot.name]
        own = Slot(slot.name, tuple(tensor.shape), slot.trainable, seen=True)
        own.name_axes([
            (cut(structure.of(f), cuts.get(slot.name, [])), role)
            for f, role in zip(slot.fields, slot.roles, strict=True)
        ])
        slots[id(tensor)] = own
    return slots


def _fixed(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"sizes are fixed in the code ({line})"


def _only_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The result of a heavy operator as far as a replay cares: its shape."""

    def flat(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    out = func(*(flat(a) for a in args), **{k: flat(v) for k, v in kwargs.items()})
    return torch.zeros(out.shape, dtype=out.dtype, device=args[0].device)


__all__ = ["Mismatch", "Place", "replay"]
