"""The tracer that validates labels while a compact model runs.

Every weight carries the labels it kept. Two labels that meet must be in the same class, sizes must
be as predicted, and a module must return its channels in the predicted order. If only the order
differs, a gather at the module's output corrects it; everything else is a mismatch at a known
operator. `dry_run` decides which model runs, and on which inputs.
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
from fpgm.tracing import shape_inference
from fpgm.tracing.grouping import Structure
from fpgm.tracing.labels import Fields
from fpgm.tracing.operator_log import OperatorLog
from fpgm.tracing.ops import registry as rules
from fpgm.tracing.trace_values import Factor, ParameterInfo, Place
from fpgm.utils.adapter_spec import Adapter, Side
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import named_tensors
from fpgm.utils.outputs import Leaf
from fpgm.utils.tracebacks import source_line


class MismatchError(Exception):
    """The compact model does not behave as the labels predict; carries the classes involved.

    Args:
        reason: What is wrong, and where in the model's code.
        classes: The classes to freeze if it cannot be fixed.
        place: The fixed-size operator that caused it, if one did.
        may_wait: See the attribute, like the following ones.
    """

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
        """The enclosing module may still return the right channels."""
        self.of_values = of_values
        """An operator or the model's code raised it, and may not do so with other values."""
        self.is_guess = False
        """The classes are those of the last channels before the model's code failed."""
        self.progress = 0
        """How many operators had run."""
        self.wrong_outputs = wrong_outputs
        """No labels were misaligned, but the outputs differ from the masked model's."""
        self.one_channel_left = False
        """Only parts that shrank to one channel are in doubt: with two, labels would tell."""


class ValidatingTracer(AdapterChecks):
    """A tracer that checks labels instead of recording them.

    Args:
        small: The compact model.
        structure: The channel groups and trace of the original.
        plan: The plan that the compact model was made with.
        removed: The classes that it removes.
        tolerated: Operators whose sizes may differ from the prediction.
        values: Compute with real values; otherwise heavy operators run on shapes alone.
    """

    trusts_positions = True
    may_assume_sizes = False

    def __init__(
        self,
        small: nn.Module,
        structure: Structure,
        plan: Plan,
        removed: Tensor,
        tolerated: Set[tuple[Place, int]],
        values: bool,
    ) -> None:
        super().__init__(small, _kept_parameter_infos(small, structure, plan))
        self.structure = structure
        self._frozen: Counter[tuple[Place, str]] = Counter()
        self._seen_ops: set[tuple[Place, int]] = set()
        self._norm_groups: Counter[tuple[Place, str]] = Counter()
        self.kept = structure.kept_labels(removed)
        self.adapters: dict[tuple[str, Side], Adapter] = {}
        self._latest: list[Tensor] = []
        self._upcoming: tuple[Place, int] | None = None
        self._trail: list[list[Tensor]] = []
        self._last = "the model"
        self._branches = {point.module: point.labels for point in structure.trace.insertion_points}
        self._pads = {label for row in structure.trace.pads for label in row.tolist()}
        self._windows = {point.module: point.labels for point in structure.trace.windows}
        self._pickers = {point.module: point.labels for point in structure.trace.picks}
        self._scattered: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._padding = False
        self.tolerated = tolerated
        self.values = values
        self._logs: dict[int, OperatorLog] = {}
        """The operators of each run."""
        self._unordered_at = ""
        self.unordered: list[Tensor] = []
        """Labels whose order is not known: parts that shrank to one channel have none, and several
        channels of one unit share one."""
        self.single = _single_labels(structure, self.parameter_infos.values())
        """Labels of parts that shrank to one channel."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._padding = rules.name_of(func) == "constant_pad_nd"
        log = self._logs.get(self.runs)
        if log is None:
            log = self._logs[self.runs] = OperatorLog(self.given)
        log.add(func, args, kwargs)
        try:
            out = None if self.values else shape_inference.infer_shape(func, args, kwargs)
            out = super().call(func, args, kwargs) if out is None else out
        except (RuntimeError, IndexError, ValueError) as error:
            self._trail.append([f for x in rules.tensors(args) for f in self.fields(x)])
            at = self.next_fixed_size_op()
            place = at if at in self.structure.trace.fixed_size_ops else self._upcoming
            raise self._attribute_mismatch(
                f"{_fixed_size_reason(error)} in {self.where()}", place, True
            ) from None
        self._upcoming = self.current_call(self.module), self._fixed_size_counts[self.module] + 1
        self._last = self.module or "the model"
        self._latest = list(rules.tensors((*args, *kwargs.values())))
        self._trail.append([f for x in self._latest for f in self.fields(x)])
        log.add_results([out] if isinstance(out, Tensor) else rules.tensors((out,)))
        return out

    def end_log(self, leaves: Iterable[Leaf]) -> None:
        """Note what the model returns, at the end of a run."""
        if self.runs in self._logs:
            self._logs[self.runs].end(leaves)

    def runs_as_traced(self) -> bool:
        """Tell whether every run had the trace's operators, with the same numbers.

        Not known where values were read or an adapter moved channels.
        """
        before = self.structure.trace.logs
        return (
            not self.values
            and not self.adapters
            and bool(self._logs)
            and all(
                number in before and log.is_same(before[number], sizes_may_differ=True)
                for number, log in self._logs.items()
            )
        )

    @property
    def operator_count(self) -> int:
        """Return how many operators have run."""
        return len(self._trail)

    def error_between_operators(self, error: Exception) -> MismatchError:
        """Return the mismatch for an error that user code raised between operators."""
        return self._attribute_mismatch(
            f"{_fixed_size_reason(error)} in {self._last}", self._upcoming
        )

    def _attribute_mismatch(
        self, reason: str, place: tuple[Place, int] | None, of_values: bool = False
    ) -> MismatchError:
        """Return a mismatch with the classes of the last result that could still shrink.

        A part that shrank to one channel has lost its labels here, but the trace has them.
        """
        trail = list(self._trail)
        op = self.structure.trace.fixed_size_ops.get(place) if place is not None else None
        if op is not None and op.source is not None:
            trail.insert(len(trail) - 1, list(op.source.fields))
        mismatch = MismatchError(reason, [], place, of_values=of_values)
        for fields in reversed(trail):
            classes = [self.structure.classes_of(f) for f in fields]
            live = [c for c in classes if self._can_shrink(c)]
            if live:
                mismatch.classes, mismatch.is_guess = live[0].reshape(-1), True
                break
        return mismatch

    def new_labels(self, count: int) -> Tensor:
        return torch.full((count,), lb.ANY)

    def fixed_labels(self, number: int, count: int) -> Tensor:
        labels = self.structure.trace.parts.get((self.current_concat(), number))
        if labels is None or len(labels) != count:
            self._mark_unordered(*(f for t in self._latest for f in self.fields(t)))
            return torch.full((count,), lb.ANY)
        return labels

    def set(self, tensor: Tensor, fields: Sequence[Tensor]) -> None:
        super().set(tensor, fields)
        for f in fields:
            if f.numel() == 1 and int(f) != lb.ANY:
                self.single.append(f)

    def tie(self, field: Tensor, dims: Sequence[int]) -> None:
        """Raise unless labels along these dims are in one class, even if never combined."""
        for dim in dims:
            classes = self.structure.classes_of(field)
            padding = (field == lb.ANY) | (field.narrow(dim, 0, 1) == lb.ANY)
            if not bool(((classes == classes.narrow(dim, 0, 1)) | padding).all()):
                raise self._misaligned_error([field])

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a == lb.ANY, b, a)

    def relate(self, a: Tensor, b: Tensor) -> None:
        try:
            a, b = torch.broadcast_tensors(a, b)
        except RuntimeError:
            raise self._misaligned_error([a, b]) from None
        other = (a != b) & (a != lb.ANY) & (b != lb.ANY)
        if not bool(other.any()):
            return
        a, b = a[other], b[other]
        if not torch.equal(self.structure.classes_of(a), self.structure.classes_of(b)):
            raise self._misaligned_error([a, b])
        if not self._joined_in_trace(a, b):
            # One unit, but other channels of it were combined before (a norm over all of them).
            self._mark_unordered(a)

    def _joined_in_trace(self, a: Tensor, b: Tensor) -> bool:
        pairs, keys = self._recorded_pairs, self._key(a, b)
        places = torch.searchsorted(pairs, keys).clamp(max=len(pairs) - 1)
        return bool(len(pairs)) and torch.equal(pairs[places], keys)

    @cached_property
    def _recorded_pairs(self) -> Tensor:
        """Return every pair of labels that the trace combined, sorted."""
        pairs = [self._key(a, b) for a, b in self.structure.trace.meetings]
        return torch.cat(pairs).unique() if pairs else torch.zeros(0, dtype=torch.int64)

    def _key(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b) * self.structure.trace.count + torch.maximum(a, b)

    def _misaligned_error(self, fields: Sequence[Tensor], where: str = "") -> MismatchError:
        reason = f"channels would not line up after pruning in {where or self.where()}"
        classes = [self.structure.classes_of(f) for f in fields]
        if self.structure.groups and not any(map(self._can_shrink, classes)):
            return self._attribute_mismatch(reason, None)
        return MismatchError(reason, classes)

    def _can_shrink(self, classes: Tensor) -> bool:
        """Tell whether any of these classes may still be removed."""
        return bool(torch.isin(classes, self._units).any())

    @cached_property
    def _units(self) -> Tensor:
        return torch.cat([group.units for group in self.structure.groups])

    def _mark_unordered(self, *fields: Tensor) -> None:
        self._unordered_at = self._unordered_at or self.where()
        self.unordered += fields

    def unresolved_mismatch(self) -> MismatchError | None:
        """Return the mismatch that labels could neither confirm nor rule out, if any."""
        doubtful = self.unordered or self.single
        if not doubtful:
            return None
        mismatch = self._misaligned_error(doubtful, self._unordered_at)
        mismatch.one_channel_left = not self.unordered
        return mismatch

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        """Check that the labels frozen in the trace are still there, in the same order."""
        key = self.current_call(self.module), f"{reason} in {self.where()}"
        recorded = self.structure.trace.frozen.get(key, [])
        for f in fields:
            number, self._frozen[key] = self._frozen[key], self._frozen[key] + 1
            if number < len(recorded):
                self._compare_rows(f, recorded[number])
            elif bool((f != lb.ANY).any()):  # zeros added by our own adapters are not channels
                self._mark_unordered(f)

    def _compare_rows(self, field: Tensor, recorded: Tensor) -> None:
        """Raise a mismatch unless a field equals the kept part of the recorded one."""
        wanted = recorded.reshape(-1)
        wanted = wanted[self.kept[wanted]]
        if len(wanted) != field.numel():
            raise self._misaligned_error([wanted, field])
        self.relate(wanted, field.reshape(-1))

    def check_results(self, results: Sequence[Tensor]) -> None:
        """Check that the model returns what it did in the trace, without the removed units."""
        self.recognize(results)
        expected = self.structure.trace.results[self.runs]
        if len(expected) != len(results):
            raise self._attribute_mismatch(
                "the model would return a different number of tensors", None, True
            )
        for tensor, factor in zip(results, expected, strict=True):
            labelled = {d for f in factor.fields for d in lb.axes(f)}
            fits = tensor.ndim == len(factor.shape) and all(
                d in labelled or size == factor.shape[d] for d, size in enumerate(tensor.shape)
            )
            if not fits:
                raise self._attribute_mismatch(
                    "the size of the model's output would change", None, True
                )
            self._check_result(tensor, factor)

    def _check_result(self, tensor: Tensor, expected: Factor) -> None:
        fields_by_axes = {tuple(lb.axes(f)): f for f in self.fields(tensor)}
        for recorded in expected.fields:
            field = fields_by_axes.get(tuple(lb.axes(recorded)))
            if field is not None:
                self._compare_rows(field, recorded)
            else:
                self._mark_unordered(recorded)

    def on_values_leave(self, tensor: Tensor, method: str) -> None:
        if not self.values:
            raise shape_inference.ValuesNeededError
        super().on_values_leave(tensor, method)

    def is_zero(self, tensor: Tensor) -> bool:
        """Return True: the trace has already established where masked units are zero."""
        return True

    def slide_along_channels(self, dim: int, labels: Tensor) -> bool:
        """Check that every channel has the same neighbors: the adapter's positions are fixed."""
        wanted = self._windows.get(self.module)
        if wanted is not None and len(wanted) == len(labels):
            stays = self.kept[wanted]
            self.relate(labels[stays], wanted[stays])
        return True

    def note_norm_group(self, size: int) -> None:
        key = self.current_call(self.module), source_line()
        number, self._norm_groups[key] = self._norm_groups[key], self._norm_groups[key] + 1
        sizes = self.structure.trace.norm_groups.get(key, [])
        if number >= len(sizes) or sizes[number] != size:
            reason = f"the number of groups is fixed in the code in {self.where()}"
            raise self._attribute_mismatch(reason, None)

    def run(self, example: Example) -> Any:
        out = super().run(example)
        self._mark_missing_ops()
        return out

    def _mark_missing_ops(self) -> None:
        """Note channels whose size an operator fixed in the trace that does not run here.

        Torch leaves out a slice that is as large as its input, as `y[:, :6]` is of 6 channels.
        """
        classes_of = self.structure.classes_of
        for key, op in self.structure.trace.fixed_size_ops.items():
            (run, path, _), _ = key
            if run == self.runs and key not in self._seen_ops:
                shrink = [f for f in op.out.fields if self._can_shrink(classes_of(f))]
                if shrink:
                    self._unordered_at = self._unordered_at or f"{path or 'the model'} ({op.line})"
                    self.unordered += shrink

    def next_fixed_size_op(self) -> tuple[Place, int]:
        """Return the trace's key for the running operator: the next one of the same line of code.

        What a module caches between calls (a grid of anchors, by the size of its input) may have
        been computed in one of the two runs only.
        """
        key = self._find_fixed_size_op()
        self._seen_ops.add(key)
        return key

    def _find_fixed_size_op(self) -> tuple[Place, int]:
        here, line = self.current_call(self.module), source_line()
        number = self._fixed_size_counts[self.module] + 1
        while (op := self.structure.trace.fixed_size_ops.get((here, number))) is not None:
            if op.line == line:
                self._fixed_size_counts[self.module] = number
                break
            number += 1
        return here, number

    def note_fixed_size_op(
        self, out: Tensor, source: Tensor | None, dims: Sequence[int] | None
    ) -> None:
        place = self.next_fixed_size_op()
        expected = self.structure.trace.fixed_size_ops.get(place)
        if expected is None or place in self.tolerated:
            return
        if self._fits(expected.out, tuple(out.shape)):
            self._label_constant(out, expected.out.fields)
            return
        raise MismatchError(
            f"a size is fixed in the code in {self.where()}",
            [self.structure.classes_of(f) for f in expected.out.fields],
            place,
            # All padding is the same, so the enclosing module may still return the right channels.
            may_wait=self._padding,
        )

    def _label_constant(self, out: Tensor, fields: Fields) -> None:
        """Give a new tensor of one constant the labels of the trace, which fit it in any order.

        Without them its axes would look like those of no channels, and rules that count the labels
        along an axis would find fewer than in the trace.
        """
        have = self.fields(out)
        if not have or any(bool((f != lb.ANY).any()) for f in have):
            return
        dropped = self.structure.trace.dropped_constants
        flat = [f for f in fields if len(lb.axes(f)) == 1 and int(f.reshape(-1)[0]) not in dropped]
        rows = [(lb.axes(f)[0], f.reshape(-1)) for f in flat]
        self.set(out, [lb.along(row[self.kept[row]], out.ndim, dim) for dim, row in rows])

    def _fits(self, expected: Factor, shape: tuple[int, ...]) -> bool:
        """Tell whether a shape is the recorded one without the removed channels."""
        if len(shape) != len(expected.shape):
            return False
        masks = lb.independent(expected.fields, self.kept)
        varying = {d for stays in masks for d in lb.axes(stays)}
        return all(shape[d] == n for d, n in enumerate(expected.shape) if d not in varying) and all(
            any(
                tuple(shape[d] for d in lb.axes(stays)) == sizes
                for sizes in lb.remaining_sizes(stays)
            )
            for stays in masks
        )

    def note_overwritten(self, x: Tensor) -> None:
        super().note_overwritten(x)
        self._scattered.pop(x, None)

    def note_passed(self, x: Tensor, out: Tensor) -> None:
        super().note_passed(x, out)
        if x in self._scattered and out is not x:
            self._scattered[out] = self._scattered[x]

    def note_picked(self, x: Tensor, out: Tensor) -> None:
        if self.module in self._pickers and x in self._scattered:
            self.set(out, [lb.along(self._scattered[x], out.ndim, 1)])

    def labels_read(self, x: Tensor, weight: Tensor, row: Tensor | None) -> Tensor | None:
        """Return the branch's labels where a convolution reads a branch that lost no channel."""
        if self.module in self._pickers and x in self._scattered:
            row = self._scattered[x]
        return row

    def _enter_stream(self, path: str, out: Tensor, expected: Factor) -> Tensor | None:
        """Give the output of a branch the labels of the stream it enters."""
        labels = self._branches[path]
        if tuple(out.shape) != expected.shape:
            raise self._misaligned_error([labels])
        self._check_places(path, out, lb.axes(expected.fields[0])[0], labels)
        out_alias: Tensor = torch.ops.aten.alias(out)
        self.set(out_alias, expected.fields)
        self._scattered[out_alias] = labels[self.kept[labels]]
        return out_alias

    def _check_places(self, path: str, out: Tensor, dim: int, labels: Tensor) -> None:
        """Place a branch's channels in their new order, if a shuffle has changed it."""
        places = torch.nonzero(self.kept[labels]).reshape(-1)
        if len(places) in (1, len(labels)):
            return
        fields = [f for f in self.fields(out) if lb.axes(f) == [dim]]
        if len(fields) != 1:
            self._mark_unordered(labels)
            return
        have, wanted = fields[0].reshape(-1)[places], labels[places]
        if torch.equal(have, wanted):
            return
        order = self._positions(have.tolist(), wanted.tolist())
        if order is None:
            raise self._misaligned_error([have, wanted])
        index = torch.empty_like(places)
        index[order] = places
        adapter = Adapter(path, "output", "scatter", dim, tuple(index.tolist()), len(labels))
        self._add_adapter(adapter, have, wanted)

    def _add_adapter(self, adapter: Adapter, have: Tensor, wanted: Tensor) -> None:
        """Add an adapter to the plan, the same at every call; the model itself can have none."""
        place = adapter.module, adapter.side
        if not adapter.module or self.adapters.setdefault(place, adapter) != adapter:
            raise self._misaligned_error([have, wanted])

    def on_module_return(self, path: str, out: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return self._compare(path, out)

    def _compare(self, path: str, out: Any) -> Any:
        """Compare a module's channels with the predicted ones."""
        expected = self.structure.trace.returns.get(self.current_call(path))
        if expected is None or not isinstance(out, Tensor) or len(expected.fields) != 1:
            return None
        if path in self._branches:
            return self._enter_stream(path, out, expected)
        field = expected.fields[0]
        used = lb.axes(field)
        wanted = field.reshape(-1)[self.kept[field.reshape(-1)]]
        if len(used) != 1 or len(wanted) == field.numel():
            return None
        fields = [f for f in self.fields(out) if lb.axes(f) == used]
        if len(fields) != 1:
            if len(wanted) > 1:
                self._mark_unordered(wanted)
            return None
        have = fields[0].reshape(-1)
        if torch.equal(wanted, have):
            return None
        return self._gather_predicted(path, out, used[0], have, wanted)

    def _gather_predicted(
        self, path: str, out: Tensor, dim: int, have: Tensor, wanted: Tensor
    ) -> Tensor | None:
        """Pick the predicted channels, in the predicted order, out of what the module returns."""
        index = self._positions(have.tolist(), wanted.tolist())
        if index is None:
            raise self._misaligned_error([have, wanted])
        if index == list(range(len(have))):
            return None
        adapter = Adapter(path, "output", "gather", dim, tuple(index), len(have))
        before = adapter_at(self.model, path, "output")
        if before is not None and (before.kind != "gather" or before.dim != dim):
            raise self._misaligned_error([have, wanted])
        adapter = adapter if before is None else join(before, adapter)
        self._add_adapter(adapter, have, wanted)
        picked = out.index_select(dim, torch.tensor(index, device=out.device))
        self.set(picked, [lb.along(wanted, out.ndim, dim)])
        return picked

    def _positions(self, have: list[int], wanted: list[int]) -> list[int] | None:
        """Return the position of each wanted label: its own, its class's only one, or padding.

        Padding is wanted as padding, even where a later operator ties it to a channel. A label
        that occurs twice (a mean next to its image) is ambiguous: then the result is None.
        """
        named = [label for label in have if label != lb.ANY]
        if len(set(named)) < len(named) or len(set(wanted)) < len(wanted):
            return None
        places = {label: i for i, label in enumerate(have)}
        spare = [i for i, label in enumerate(have) if label == lb.ANY]
        by_class: dict[int, list[int]] = {}
        for i, c in enumerate(self.structure.classes_of(torch.tensor(have)).tolist()):
            by_class.setdefault(c, []).append(i)
        positions = []
        for label, c in zip(
            wanted, self.structure.classes_of(torch.tensor(wanted)).tolist(), strict=True
        ):
            alike = by_class.get(c, [])
            if label in places:
                positions.append(places[label])
            elif spare and (not alike or label in self._pads):
                positions.append(spare.pop(0))
            elif len(alike) == 1:
                positions.append(alike[0])
            else:
                return None
        return positions if len(set(positions)) == len(positions) else None


def _single_labels(structure: Structure, kept: Iterable[ParameterInfo]) -> list[Tensor]:
    """Return the labels of axes that shrank to one position, where labels are dropped."""
    before = {info.name: info.fields for info in structure.trace.parameter_infos.values()}
    shrunk = (before[info.name] for info in kept if len(info.fields) < len(before[info.name]))
    return [f for fields in shrunk for f in fields]


def _kept_parameter_infos(
    small: nn.Module, structure: Structure, plan: Plan
) -> dict[int, ParameterInfo]:
    """Return the parameter infos of the compact model, with the labels that were kept."""
    cuts = by_tensor(plan.cuts)
    tensors = named_tensors(small)
    parameter_infos = {}
    for info in structure.trace.parameter_infos.values():
        tensor = tensors[info.name]
        kept_info = ParameterInfo(info.name, tuple(tensor.shape), info.trainable, has_labels=True)
        kept_info.name_axes(
            [
                (cut(f, cuts.get(info.name, [])), role)
                for f, role in zip(info.fields, info.roles, strict=True)
            ]
        )
        parameter_infos[id(tensor)] = kept_info
    return parameter_infos


def _fixed_size_reason(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"sizes are fixed in the code ({line})"
