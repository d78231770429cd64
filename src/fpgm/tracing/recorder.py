"""Watching forward passes in eval and train mode, collecting everything the rules find in them.

The model's weights, buffers, attributes, mode and random state are as before when watching ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpgm.errors import ForwardError
from fpgm.tracing import labels as lb
from fpgm.tracing import shape_inference as sketch
from fpgm.tracing.code_names import CodeNames
from fpgm.tracing.constraints import (
    Balance,
    Factor,
    Grouped,
    Join,
    Move,
    Place,
    Risk,
    RoleMark,
    Site,
    Slot,
    Stop,
    Sum,
    Work,
)
from fpgm.tracing.labels import Fields
from fpgm.tracing.ops import registry as rules
from fpgm.tracing.pass_comparison import repeats
from fpgm.tracing.tracer import RuleError, Tracer, source_line
from fpgm.utils.adapter_spec import Adapter, Side
from fpgm.utils.example_inputs import Example, batch_of, resized, tensors_in
from fpgm.utils.modules import TABLES, every_module, module_at, modules_by_path, named_tensors
from fpgm.utils.outputs import read_outputs
from fpgm.utils.parameter_info import Role
from fpgm.utils.preserve_state import undisturbed
from fpgm.utils.tracebacks import describe_error
from fpgm.utils.weight_hooks import weight_hooks


@dataclass(frozen=True)
class Pass:
    """A forward pass that worked: its number, the mode and the arguments."""

    number: int
    training: bool
    example: Example
    repeats_eval: bool = False
    """Whether a pass in eval mode showed the same, so that a dry run may leave it out."""


class _Carried(NamedTuple):
    """Labels of an operator's inputs, and how much had been found before its rule ran."""

    fields: list[Tensor]
    stops: int
    pairs: int


class Watch(Tracer):
    """Collects everything the rules find in one or several forward passes."""

    def __init__(self, model: nn.Module, values: bool = True) -> None:
        super().__init__(model, _slots(model))
        self.values = values
        """Whether heavy operators really run; else their results have a shape and no values."""
        self.code = CodeNames(model)
        self.count = 1
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.meetings: list[tuple[Tensor, Tensor]] = []
        """The pairs that met at one position; others only go together."""
        self.stops: list[Stop] = []
        self.frozen: dict[tuple[Place, str], list[Tensor]] = {}
        """The fields that each operator froze, by its call and what was said of it."""
        self.balances: list[Balance] = []
        self.roles: list[RoleMark] = []
        self.sums: list[Sum] = []
        self.works: list[Work] = []
        self.groupings: list[Grouped] = []
        self.pairings: list[tuple[Tensor, Tensor]] = []
        self.windows: list[Site] = []
        self.parts: dict[tuple[Join, int], Tensor] = {}
        self.pads: list[Tensor] = []
        self._pieces: tuple[Tensor, ...] = ()
        self.sites: list[Site] = []
        self.picks: list[Site] = []
        self.returns: dict[Place, Factor] = {}
        self.outputs: list[Factor] = []
        self.passes: list[Pass] = []
        self.results: dict[int, list[Factor]] = {}
        """Every tensor that the model returned in each run."""
        self._stacks: dict[int, set[tuple[int, int]]] = {}
        self._stack_count = 0
        self.notes: list[str] = []
        self.moves: dict[tuple[Place, Side], Move] = {}
        self._first_moves: dict[tuple[str, Side], Move] = {}
        self.cached: dict[tuple[str, str], list[Factor]] = {}
        """Activations that modules keep in plain attributes, by module and name."""
        self.risks: dict[tuple[Place, int], Risk] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.values:
            return super().call(func, args, kwargs)
        out = sketch.outline(func, args)
        if out is not None:
            return out
        if func._schema.is_mutable and self._writes_weights(args):
            raise sketch.ValuesNeededError  # initialised from its first input
        return super().call(func, args, kwargs)

    def leaves(self, tensor: Tensor, method: str) -> None:
        if not self.values:
            raise sketch.ValuesNeededError
        super().leaves(tensor, method)

    def _writes_weights(self, args: tuple[Any, ...]) -> bool:
        slot = self.slots.get(id(args[0])) if args else None
        return slot is not None and slot.trainable

    def fresh(self, count: int) -> Tensor:
        start = self.count
        self.count += count
        return torch.arange(start, self.count)

    def fixed(self, number: int, count: int) -> Tensor:
        labels = self.fresh(count)
        self.freeze([labels], "a part of fixed size is concatenated")
        self.parts[self.this_join(), number] = labels
        return labels

    def relate(self, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            a, b = torch.broadcast_tensors(a, b)
        if a is not b:
            self.pairs.append((a.reshape(-1), b.reshape(-1)))
            self.meetings.append(self.pairs[-1])

    def tie(self, field: Tensor, dims: Sequence[int]) -> None:
        for dim in dims:
            if field.shape[dim] > 1:
                first = field.narrow(dim, 0, 1).expand(field.shape)
                self.pairs.append((field.reshape(-1), first.reshape(-1)))

    def stacked(self, rows: Tensor) -> None:
        self._stack_count += 1
        for row in rows.tolist():
            for position, label in enumerate(row):
                self._stacks.setdefault(label, set()).add((self._stack_count, position))

    def stacks(self, a: Tensor, b: Tensor) -> bool:
        one, other = (self._stacks.get(int(label), set()) for label in (a, b))
        return not one.isdisjoint(other)

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        if fields:
            where = self.where()
            told = f"{reason} in {where}"
            for f in fields:
                self.stops.append(Stop(f.reshape(-1), told, soft))
            self.frozen.setdefault((self.here(self.module), told), []).extend(fields)

    def carried(self, inputs: Sequence[Tensor]) -> _Carried:
        fields = [f for x in inputs for f in self._named(x)]
        return _Carried(fields, len(self.stops), len(self.pairs))

    def _named(self, tensor: Tensor) -> Sequence[Tensor]:
        """Labels that a tensor has; a parameter that no rule has seen gets none by being asked."""
        slot = self.slots.get(id(tensor))
        return () if slot is not None and not slot.seen else self.fields(tensor)

    def check_passed(self, name: str, carried: _Carried, out: Any) -> None:
        """Freeze labels that were lost: whoever reads the result may depend on them."""
        if not carried.fields:
            return
        passed = [f for result in rules.tensors((out,)) for f in self._named(result)]
        same = set(map(id, passed))
        missing = [f for f in carried.fields if id(f) not in same]
        if missing:
            places = {f.data_ptr() for f in passed}
            missing = [f for f in missing if f.data_ptr() not in places]
        if not missing:
            return
        stops, pairs = self.stops[carried.stops :], self.pairs[carried.pairs :]
        known = [*passed, *(s.labels for s in stops), *(side for pair in pairs for side in pair)]
        found = torch.cat([f.reshape(-1) for f in known]) if known else torch.zeros(0).long()
        lost = [f for f in missing if not bool(torch.isin(f, found).any())]
        self.freeze(lost, f"'{name}' does not pass them on")

    def balance(self, blocks: Tensor, whole: bool = True) -> None:
        if blocks.shape[0] > 1:
            self.balances.append(Balance(blocks, whole))

    def role(self, field: Tensor, role: Role, weight: Tensor) -> None:
        self.roles.append(RoleMark(field.reshape(-1), role, self.made_of(weight)))

    def added(self, out: Tensor, part: Tensor, terms: Sequence[Tensor]) -> None:
        slots = frozenset().union(*map(self.made_of, terms))
        out, part = torch.broadcast_tensors(out, part)
        if out is not part:
            self.sums.append(Sum(out.reshape(-1), part.reshape(-1), slots))

    def padded(self, ends: Sequence[Tensor]) -> None:
        self.pads += ends
        self.sized(ends)

    def sized(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = tuple(piece.reshape(-1) for piece in pieces)

    def work(self, times: int, factors: Sequence[tuple[Fields, Sequence[int]]]) -> None:
        if not self.passes:
            self.works.append(Work(times, tuple(Factor(f, tuple(s)) for f, s in factors)))

    def paired(self, ins: Tensor, outs: Tensor) -> None:
        self.pairings.append((ins, outs))

    def grouped(self, blocks: Tensor) -> None:
        self.groupings.append(Grouped(self.module, blocks))

    def window(self, dim: int, labels: Tensor) -> bool:
        if not self.module or not isinstance(
            module_at(self.model, self.module), nn.modules.conv._ConvNd
        ):
            return False
        self.windows.append(Site(self.module, dim, labels))
        return True

    def returned(self, path: str, out: Any) -> None:
        if isinstance(out, Tensor):
            self.returns[self.here(path)] = Factor(self.fields(out), tuple(out.shape))

    def risky(self, out: Tensor, source: Tensor | None) -> None:
        known = Factor(self.fields(out), tuple(out.shape))
        origin = None if source is None else Factor(self.fields(source), tuple(source.shape))
        even = len({len(piece) for piece in self._pieces}) <= 1  # chunk may leave a shorter rest
        fields = (*known.fields, *(origin.fields if origin is not None else ()))
        flat = all(len(lb.axes(f)) < 2 for f in fields)  # merging several may change their order
        safe = self.calls.derives_sizes and even and flat
        self.risks[self.next_risk()] = Risk(known, origin, self._pieces, safe, source_line())
        self._pieces = ()

    def place(self, adapter: Adapter, labels: Tensor | None, zero: bool) -> tuple[Tensor, Tensor]:
        stream = self.fresh(adapter.size)
        self.freeze([stream], "an adapter of an earlier plan keeps the full width")
        if labels is not None and not zero:
            self.freeze([labels], "zeroed channels would not be zero where an adapter places them")
        return self._record(Move(adapter, _or_none(labels), stream=stream)), stream

    def pick(self, adapter: Adapter, labels: Tensor | None, wide: Tensor | None) -> Tensor:
        if labels is not None and len(labels) == 1:
            self.freeze([labels], "an adapter picks one channel by position")
        return self._record(Move(adapter, _or_none(labels), wide))

    def _record(self, move: Move) -> Tensor:
        """Keep what an adapter moves; it moves the same channels at every call."""
        place = move.adapter.module, move.adapter.side
        first = self._first_moves.setdefault(place, move)
        for a, b in ((first.labels, move.labels), (first.wide, move.wide)):
            if a is not None and b is not None and len(a) == len(b):
                self.relate(a, b)
            elif (a is None or not len(a)) != (b is None or not len(b)):
                both = [labels for labels in (a, b) if labels is not None and len(labels)]
                self.freeze(both, "an adapter moves them in some runs only")
        self.moves[self.here(move.adapter.module), move.adapter.side] = move
        return move.labels

    def find_cached(self) -> None:
        """Look for activations in the attributes of modules, after a forward pass."""
        for path, module in modules_by_path(self.model).items():
            if type(module).__module__.startswith("torch.nn."):
                continue  # its own code keeps none
            computed = {name for name, _ in weight_hooks(module)}
            for name, value in vars(module).items():
                if name in TABLES or name in computed or type(value) in _NUMBERS:
                    continue
                for tensor in tensors_in(value) if _may_hold(value) else ():
                    if id(tensor) not in self.slots and (fields := self.fields(tensor)):
                        own = self.cached.setdefault((path, name), [])
                        own.append(Factor(fields, tuple(tensor.shape)))

    def unreached(self) -> list[str]:
        """Trainable parameters that no operator has used."""
        return [slot.name for slot in self.slots.values() if slot.trainable and not slot.seen]


_NUMBERS = frozenset((int, float, bool, str, type(None)))


def _may_hold(value: Any) -> bool:
    return isinstance(value, Tensor | list | tuple | dict | set | deque)


def watch(seen: Watch, examples: Sequence[Example], keep_outputs: bool = True) -> Watch:
    """Run every example and collect what is seen; the model is left as it was.

    Train mode is watched too, unless no code of the model can tell the modes apart: a size that
    only training uses (an auxiliary head, noise of a fixed shape) must fit the compact model.
    """
    model = seen.model
    with undisturbed(model), seen.hooked():
        failed = watch_eval(seen, examples, keep_outputs)
        if failed and not seen.values:
            raise failed[0][1]  # values decide whether it works
        seen.find_cached()
        missing = seen.unreached()
        if missing or failed or seen.code.may_depend_on_mode:
            worked = _watch_training(seen, examples, keep_outputs, missing)
            for example, error in failed:
                if not any(example is one for one in worked):
                    raise error
            seen.find_cached()
    return seen


def watch_eval(
    seen: Watch, examples: Sequence[Example], keep_outputs: bool = True
) -> list[tuple[Example, ForwardError]]:
    """Run the examples in eval mode; return those that fail, or raise if all of them do."""
    if seen.code.changes_mode or any(m.training for m in every_module(seen.model)):
        seen.model.eval()
    failed = []
    for example in examples:
        error = _failure(_run, seen, example, keep_outputs)
        if error is None:
            seen.passes.append(Pass(seen.runs, False, example))
            continue
        failed.append((example, error))
        if not seen.passes:
            seen.works.clear()
    if not seen.passes:
        raise failed[0][1]
    return failed


def _watch_training(
    seen: Watch, examples: Sequence[Example], keep_outputs: bool, missing: Sequence[str]
) -> list[Example]:
    """Run the examples in train mode; return those that work there."""
    try:
        seen.model.train()
    except Exception as error:  # the model's own code may raise anything
        _give_up_on(seen, missing, describe_error(error))
        return []
    errors = [_failure(_run_training, seen, example, keep_outputs) for example in examples]
    worked = [example for example, e in zip(examples, errors, strict=True) if e is None]
    if not worked:
        _give_up_on(seen, missing, str(errors[0]))
    return worked


def _failure(
    run: Callable[[Watch, Example, bool], None], seen: Watch, example: Example, keep_outputs: bool
) -> ForwardError | None:
    try:
        run(seen, example, keep_outputs)
    except ForwardError as error:
        return error
    return None


def _run_training(seen: Watch, example: Example, keep_outputs: bool) -> None:
    """Run one example in train mode, with a batch of two where batch norm needs that."""
    try:
        _run_without_values(seen, example, keep_outputs)
    except ForwardError as error:
        if batch_of(example) != 1 or not _needs_batch(error):
            raise
        example = resized(example, 2)
        _run_without_values(seen, example, keep_outputs)
    before = [one.number for one in seen.passes if not one.training]
    same = any(repeats(seen, seen.runs, number) for number in before)
    seen.passes.append(Pass(seen.runs, True, example, same))


def _run_without_values(seen: Watch, example: Example, keep_outputs: bool) -> None:
    """Run with shapes only, and with values where the model's code looks at them."""
    values = seen.values
    try:
        seen.values = False
        torch.manual_seed(0)
        _run(seen, example, keep_outputs)
    except (ForwardError, sketch.ValuesNeededError) as error:
        if isinstance(error, ForwardError) and _needs_batch(error):
            raise
        seen.values = True
        torch.manual_seed(0)
        _run(seen, example, keep_outputs)
    finally:
        seen.values = values


def _needs_batch(error: ForwardError) -> bool:
    return "more than 1 value per channel" in str(error.__cause__)


def _give_up_on(seen: Watch, missing: Sequence[str], why: str) -> None:
    """Freeze what only training reaches, for no example could be watched to its end there."""
    seen.notes.append(f"Train mode could not be watched: {why}")
    for slot in seen.slots.values():
        if slot.name in missing:
            for f in slot.fields:
                seen.stops.append(Stop(f.reshape(-1), "only training reaches them", False))


def _run(seen: Watch, example: Example, keep_outputs: bool) -> None:
    try:
        out = seen.run(example)
    except RuleError:
        raise
    except Exception as error:
        raise ForwardError(
            f"The model's own forward fails on the example input: {describe_error(error)}."
            f"{_dtype_hint(seen, example)}"
        ) from error
    returned = [leaf.value for leaf in read_outputs(out) if leaf.is_tensor]
    results = [tensor for tensor in returned if tensor.numel()]
    seen.recognize(results)
    seen.results[seen.runs] = [Factor(seen.fields(t), tuple(t.shape)) for t in results]
    if keep_outputs:
        for tensor in returned:  # no boxes are found, but each would have its four numbers
            for f in seen.fields(tensor):
                seen.stops.append(Stop(f.reshape(-1), "the model's output", False))
    elif not seen.passes:
        seen.outputs = seen.results[seen.runs]


def _dtype_hint(seen: Watch, example: Example) -> str:
    """Name both precisions where they differ: torch's own words rarely do."""
    weights = {p.dtype for p in seen.model.parameters() if p.is_floating_point()}
    given = {
        t.dtype for t in tensors_in((example.args, dict(example.kwargs))) if t.is_floating_point()
    }
    if not weights or not given or given <= weights:
        return ""
    have, want = (
        ", ".join(sorted(str(d).removeprefix("torch.") for d in kinds))
        for kinds in (given, weights)
    )
    return f" The example is {have}, the weights are {want}: bring one to the other's precision."


def _or_none(labels: Tensor | None) -> Tensor:
    return torch.zeros(0, dtype=torch.int64) if labels is None else labels


def _slots(model: nn.Module) -> dict[int, Slot]:
    return {
        id(tensor): Slot(name, tuple(tensor.shape), isinstance(tensor, nn.Parameter))
        for name, tensor in named_tensors(model).items()
    }
