"""What labels must be in a compact model: the tracer that checks them as it runs.

Every weight carries the labels it kept. Two labels that meet must be of one class, sizes must be as
predicted, and a module must return its channels in the predicted order. A mere change of order at
a module's output is mended by a gather there; all else is a mismatch at a known place. Which model
is run, and on what, is left to `dry_run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence, Set
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from fpgm.planning.adapter_checks import AdapterChecks
from fpgm.pruning.adapter_placement import adapter_at, join
from fpgm.pruning.plan import Plan
from fpgm.pruning.slicing import by_tensor, cut
from fpgm.tracing import labels as lb
from fpgm.tracing import shape_inference as sketch
from fpgm.tracing.constraints import Factor, Place, Slot
from fpgm.tracing.grouping import Structure
from fpgm.tracing.ops import registry as rules
from fpgm.tracing.tracer import source_line
from fpgm.utils.adapter_spec import Adapter, Side
from fpgm.utils.modules import named_tensors


class MismatchError(Exception):
    """The compact model does not do what the labels say; carries the classes involved."""

    def __init__(
        self,
        reason: str,
        classes: Sequence[Tensor],
        place: tuple[Place, int] | None = None,
        *,
        may_wait: bool = False,
        of_values: bool = False,
        wrong_outputs: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.classes = (
            torch.cat([c.reshape(-1) for c in classes]) if classes else torch.zeros(0).long()
        )
        self.place = place
        self.may_wait = may_wait
        """The module around the place may yet return the right part."""
        self.of_values = of_values
        """An operator or the model's code raised it, which other values may not make it do."""
        self.progress = 0
        """How many operators had run."""
        self.wrong_outputs = wrong_outputs
        """Nothing clashed, but the outputs are not those of the masked model."""


class Checker(AdapterChecks):
    """A tracer that checks instead of collecting."""

    trusts_positions = True
    assumes = False

    def __init__(
        self,
        small: nn.Module,
        structure: Structure,
        plan: Plan,
        removed: Tensor,
        tolerated: Set[tuple[Place, int]],
        values: bool,
    ) -> None:
        super().__init__(small, _kept_slots(small, structure, plan))
        self.structure = structure
        self._frozen: Counter[tuple[Place, str]] = Counter()
        self.kept = structure.kept_labels(removed)
        self.adapters: dict[tuple[str, Side], Adapter] = {}
        self._latest: list[Tensor] = []
        self._upcoming: tuple[Place, int] | None = None
        self._trail: list[list[Tensor]] = []
        self._last = "the model"
        self._branches = {site.module: site.labels for site in structure.seen.sites}
        self._pads = {label for row in structure.seen.pads for label in row.tolist()}
        self._windows = {site.module: site.labels for site in structure.seen.windows}
        self._pickers = {site.module: site.labels for site in structure.seen.picks}
        self._scattered: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._padding = False
        self.tolerated = tolerated
        self.values = values
        self._lost_at = ""
        self.lost: list[Tensor] = []
        """Labels whose order is not known: parts that shrank to one channel have no names, and
        several channels of one unit share one."""
        self.single = _single_labels(structure, self.slots.values())
        """Labels of parts that shrank to one channel, whatever becomes of them."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._padding = rules.name_of(func) == "constant_pad_nd"
        try:
            out = None if self.values else sketch.outline(func, args)
            out = super().call(func, args, kwargs) if out is None else out
        except (RuntimeError, IndexError, ValueError) as error:
            self._trail.append([f for x in rules.tensors(args) for f in self.fields(x)])
            at = self.next_risk()
            place = at if at in self.structure.seen.risks else self._upcoming
            raise self._blame(f"{_fixed(error)} in {self.where()}", place, True) from None
        self._upcoming = self.here(self.module), self._risks[self.module] + 1
        self._last = self.module or "the model"
        self._latest = list(rules.tensors((*args, *kwargs.values())))
        self._trail.append([f for x in self._latest for f in self.fields(x)])
        return out

    @property
    def operators(self) -> int:
        """How many operators have run."""
        return len(self._trail)

    def outside(self, error: Exception) -> MismatchError:
        """User code raised between operators."""
        return self._blame(f"{_fixed(error)} in {self._last}", self._upcoming)

    def _blame(
        self, reason: str, place: tuple[Place, int] | None, of_values: bool = False
    ) -> MismatchError:
        """A mismatch that names the last thing computed that could still shrink.

        What shrank to one channel has lost its labels here, but the watch knew them at that place.
        """
        trail = list(self._trail)
        risk = self.structure.seen.risks.get(place) if place is not None else None
        if risk is not None and risk.source is not None:
            trail.insert(len(trail) - 1, list(risk.source.fields))
        for fields in reversed(trail):
            classes = [self.structure.of(f) for f in fields]
            live = [c for c in classes if self._can_shrink(c)]
            if live:
                return MismatchError(reason, live[:1], place, of_values=of_values)
        return MismatchError(reason, [], place, of_values=of_values)

    def fresh(self, count: int) -> Tensor:
        return torch.full((count,), lb.ANY)

    def fixed(self, number: int, count: int) -> Tensor:
        labels = self.structure.seen.parts.get((self.this_join(), number))
        if labels is None or len(labels) != count:
            self._lose(*(f for t in self._latest for f in self.fields(t)))
            return torch.full((count,), lb.ANY)
        return labels

    def set(self, tensor: Tensor, fields: Sequence[Tensor]) -> None:
        super().set(tensor, fields)
        for f in fields:
            if f.numel() == 1 and int(f) != lb.ANY:
                self.single.append(f)

    def tie(self, field: Tensor, dims: Sequence[int]) -> None:
        """What goes together must be of one class; it need not have met."""
        for dim in dims:
            classes = self.structure.of(field)
            padding = (field == lb.ANY) | (field.narrow(dim, 0, 1) == lb.ANY)
            if not bool(((classes == classes.narrow(dim, 0, 1)) | padding).all()):
                raise self._clash([field])

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a == lb.ANY, b, a)

    def relate(self, a: Tensor, b: Tensor) -> None:
        try:
            a, b = torch.broadcast_tensors(a, b)
        except RuntimeError:
            raise self._clash([a, b]) from None
        other = (a != b) & (a != lb.ANY) & (b != lb.ANY)
        if not bool(other.any()):
            return
        a, b = a[other], b[other]
        if not torch.equal(self.structure.of(a), self.structure.of(b)):
            raise self._clash([a, b])
        if not self._have_met(a, b):
            # One unit, but not the channels of it that met before (a norm over all of them).
            self._lose(a)

    def _have_met(self, a: Tensor, b: Tensor) -> bool:
        met, keys = self._met, self._key(a, b)
        places = torch.searchsorted(met, keys).clamp(max=len(met) - 1)
        return bool(len(met)) and torch.equal(met[places], keys)

    @cached_property
    def _met(self) -> Tensor:
        """Every two labels that met when watching, in rising order."""
        pairs = [self._key(a, b) for a, b in self.structure.seen.meetings]
        return torch.cat(pairs).unique() if pairs else torch.zeros(0, dtype=torch.int64)

    def _key(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b) * self.structure.seen.count + torch.maximum(a, b)

    def _clash(self, fields: Sequence[Tensor], where: str = "") -> MismatchError:
        reason = f"channels would not line up after pruning in {where or self.where()}"
        classes = [self.structure.of(f) for f in fields]
        if self.structure.pools and not any(map(self._can_shrink, classes)):
            return self._blame(reason, None)
        return MismatchError(reason, classes)

    def _can_shrink(self, classes: Tensor) -> bool:
        """Whether any of these classes may still be removed."""
        return bool(torch.isin(classes, self._units).any())

    @cached_property
    def _units(self) -> Tensor:
        return torch.cat([pool.units for pool in self.structure.pools])

    def _lose(self, *fields: Tensor) -> None:
        self._lost_at = self._lost_at or self.where()
        self.lost += fields

    def doubt(self) -> MismatchError | None:
        """What labels could not tell, as the mismatch it may be."""
        doubtful = self.lost or self.single
        return self._clash(doubtful, self._lost_at) if doubtful else None

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        """Check that what was frozen when watching is still there, in the same order."""
        key = self.here(self.module), f"{reason} in {self.where()}"
        watched = self.structure.seen.frozen.get(key, [])
        for f in fields:
            number, self._frozen[key] = self._frozen[key], self._frozen[key] + 1
            if number < len(watched):
                self._compare_rows(f, watched[number])
            else:
                self._lose(f)

    def _compare_rows(self, field: Tensor, watched: Tensor) -> None:
        """Raise a mismatch unless a field is what stays of the one that was watched."""
        wanted = watched.reshape(-1)
        wanted = wanted[self.kept[wanted]]
        if len(wanted) != field.numel():
            raise self._clash([wanted, field])
        self.relate(wanted, field.reshape(-1))

    def check_results(self, results: Sequence[Tensor]) -> None:
        """The model must return what it did when watched, less what was removed."""
        self.recognize(results)
        expected = self.structure.seen.results[self.runs]
        if len(expected) != len(results):
            raise self._blame("the model would return another number of tensors", None, True)
        for tensor, factor in zip(results, expected, strict=True):
            labelled = {d for f in factor.fields for d in lb.axes(f)}
            fits = tensor.ndim == len(factor.shape) and all(
                d in labelled or size == factor.shape[d] for d, size in enumerate(tensor.shape)
            )
            if not fits:
                raise self._blame("the size of the model's output would change", None, True)
            self._check_result(tensor, factor)

    def _check_result(self, tensor: Tensor, expected: Factor) -> None:
        own = {tuple(lb.axes(f)): f for f in self.fields(tensor)}
        for watched in expected.fields:
            field = own.get(tuple(lb.axes(watched)))
            if field is not None:
                self._compare_rows(field, watched)
            else:
                self._lose(watched)

    def leaves(self, tensor: Tensor, method: str) -> None:
        if not self.values:
            raise sketch.ValuesNeededError
        super().leaves(tensor, method)

    def is_zero(self, tensor: Tensor) -> bool:
        """That silenced units are zero here was settled when watching."""
        return True

    def window(self, dim: int, labels: Tensor) -> bool:
        """Neighbours must be who they were: its positions are the plan's, whoever stands there."""
        wanted = self._windows.get(self.module)
        if wanted is not None and len(wanted) == len(labels):
            stays = self.kept[wanted]
            self.relate(labels[stays], wanted[stays])
        return True

    def next_risk(self) -> tuple[Place, int]:
        """The watch's name for the operator that runs: the next of the same line of code.

        What a module keeps from one call to the next (a grid of anchors, by the size of its input)
        may have been computed there and not here, or here and not there.
        """
        here, line = self.here(self.module), source_line()
        number = self._risks[self.module] + 1
        while (risk := self.structure.seen.risks.get((here, number))) is not None:
            if risk.line == line:
                self._risks[self.module] = number
                break
            number += 1
        return here, number

    def risky(self, out: Tensor, source: Tensor | None) -> None:
        place = self.next_risk()
        expected = self.structure.seen.risks.get(place)
        if (
            expected is None
            or place in self.tolerated
            or self._fits(expected.out, tuple(out.shape))
        ):
            return
        raise MismatchError(
            f"a size is fixed in the code in {self.where()}",
            [self.structure.of(f) for f in expected.out.fields],
            place,
            # What padding adds is all alike, so the module around it may yet return the right part.
            may_wait=self._padding,
        )

    def _fits(self, expected: Factor, found: tuple[int, ...]) -> bool:
        """Whether a shape is the watched one, less what was removed."""
        if len(found) != len(expected.shape):
            return False
        masks = lb.independent(expected.fields, self.kept)
        varying = {d for stays in masks for d in lb.axes(stays)}
        return all(found[d] == n for d, n in enumerate(expected.shape) if d not in varying) and all(
            any(
                tuple(found[d] for d in lb.axes(stays)) == sizes
                for sizes in lb.remaining_sizes(stays)
            )
            for stays in masks
        )

    def mixed(self, x: Tensor) -> None:
        super().mixed(x)
        self._scattered.pop(x, None)

    def passed(self, x: Tensor, out: Tensor) -> None:
        super().passed(x, out)
        if x in self._scattered and out is not x:
            self._scattered[out] = self._scattered[x]

    def picked(self, x: Tensor, out: Tensor) -> None:
        if self.module in self._pickers and x in self._scattered:
            self.set(out, [lb.along(self._scattered[x], out.ndim, 1)])

    def reading(self, x: Tensor, weight: Tensor, row: Tensor | None) -> Tensor | None:
        """Nothing was cut from a whole branch, so nothing is picked, but it is read as one."""
        if self.module in self._pickers and x in self._scattered:
            row = self._scattered[x]
        return row

    def _enter_stream(self, path: str, out: Tensor, expected: Factor) -> Tensor | None:
        """A branch left its module: from here on its channels are the stream's."""
        labels = self._branches[path]
        if tuple(out.shape) != expected.shape:
            raise self._clash([labels])
        self._check_places(path, out, lb.axes(expected.fields[0])[0], labels)
        handed: Tensor = torch.ops.aten.alias(out)
        self.set(handed, expected.fields)
        self._scattered[handed] = labels[self.kept[labels]]
        return handed

    def _check_places(self, path: str, out: Tensor, dim: int, labels: Tensor) -> None:
        """A branch may come in another order than before (through a shuffle): place it so."""
        places = torch.nonzero(self.kept[labels]).reshape(-1)
        if len(places) in (1, len(labels)):
            return
        own = [f for f in self.fields(out) if lb.axes(f) == [dim]]
        if len(own) != 1:
            self._lose(labels)
            return
        have, wanted = own[0].reshape(-1)[places], labels[places]
        if torch.equal(have, wanted):
            return
        order = self._positions(have.tolist(), wanted.tolist())
        if order is None:
            raise self._clash([have, wanted])
        index = torch.empty_like(places)
        index[order] = places
        adapter = Adapter(path, "output", "scatter", dim, tuple(index.tolist()), len(labels))
        self._add(adapter, have, wanted)

    def _add(self, adapter: Adapter, have: Tensor, wanted: Tensor) -> None:
        """Let the plan have an adapter, the same at every call; the model itself takes none."""
        place = adapter.module, adapter.side
        if not adapter.module or self.adapters.setdefault(place, adapter) != adapter:
            raise self._clash([have, wanted])

    def returned(self, path: str, out: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return self._compare(path, out)

    def _compare(self, path: str, out: Any) -> Any:
        """A module's channels against the predicted ones."""
        expected = self.structure.seen.returns.get(self.here(path))
        if expected is None or not isinstance(out, Tensor) or len(expected.fields) != 1:
            return None
        if path in self._branches:
            return self._enter_stream(path, out, expected)
        field = expected.fields[0]
        used = lb.axes(field)
        wanted = field.reshape(-1)[self.kept[field.reshape(-1)]]
        if len(used) != 1 or len(wanted) == field.numel():
            return None
        own = [f for f in self.fields(out) if lb.axes(f) == used]
        if len(own) != 1:
            if len(wanted) > 1:
                self._lose(wanted)
            return None
        have = own[0].reshape(-1)
        if torch.equal(wanted, have):
            return None
        return self._mend(path, out, used[0], have, wanted)

    def _mend(
        self, path: str, out: Tensor, dim: int, have: Tensor, wanted: Tensor
    ) -> Tensor | None:
        """Pick the predicted channels, in the predicted order, out of what the module returns."""
        index = self._positions(have.tolist(), wanted.tolist())
        if index is None:
            raise self._clash([have, wanted])
        if index == list(range(len(have))):
            return None
        adapter = Adapter(path, "output", "gather", dim, tuple(index), len(have))
        before = adapter_at(self.model, path, "output")
        if before is not None and (before.kind != "gather" or before.dim != dim):
            raise self._clash([have, wanted])
        adapter = adapter if before is None else join(before, adapter)
        self._add(adapter, have, wanted)
        picked = out.index_select(dim, torch.tensor(index, device=out.device))
        self.set(picked, [lb.along(wanted, out.ndim, dim)])
        return picked

    def _positions(self, have: list[int], wanted: list[int]) -> list[int] | None:
        """Where each wanted label stands: itself, else the only one of its class, else padding.

        Padding is wanted as padding, even where what it meets later makes it one with a channel.
        A label that stands twice (a mean beside its image) could be either: then nothing is known.
        """
        named = [label for label in have if label != lb.ANY]
        if len(set(named)) < len(named) or len(set(wanted)) < len(wanted):
            return None
        places = {label: i for i, label in enumerate(have)}
        spare = [i for i, label in enumerate(have) if label == lb.ANY]
        by_class: dict[int, list[int]] = {}
        for i, c in enumerate(self.structure.of(torch.tensor(have)).tolist()):
            by_class.setdefault(c, []).append(i)
        found = []
        for label, c in zip(wanted, self.structure.of(torch.tensor(wanted)).tolist(), strict=True):
            alike = by_class.get(c, [])
            if label in places:
                found.append(places[label])
            elif spare and (not alike or label in self._pads):
                found.append(spare.pop(0))
            elif len(alike) == 1:
                found.append(alike[0])
            else:
                return None
        return found if len(set(found)) == len(found) else None


def _single_labels(structure: Structure, kept: Iterable[Slot]) -> list[Tensor]:
    """Labels of axes of which one position is left, and so no name."""
    before = {slot.name: slot.fields for slot in structure.seen.slots.values()}
    shrunk = (before[slot.name] for slot in kept if len(slot.fields) < len(before[slot.name]))
    return [f for fields in shrunk for f in fields]


def _kept_slots(small: nn.Module, structure: Structure, plan: Plan) -> dict[int, Slot]:
    """The slots of the compact model, with the labels that stayed."""
    cuts = by_tensor(plan.cuts)
    tensors = named_tensors(small)
    slots = {}
    for slot in structure.seen.slots.values():
        tensor = tensors[slot.name]
        own = Slot(slot.name, tuple(tensor.shape), slot.trainable, seen=True)
        own.name_axes(
            [
                (cut(f, cuts.get(slot.name, [])), role)
                for f, role in zip(slot.fields, slot.roles, strict=True)
            ]
        )
        slots[id(tensor)] = own
    return slots


def _fixed(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"sizes are fixed in the code ({line})"
