"""Record forward passes in eval and train mode, with everything the rules report.

The model's weights, buffers, attributes, mode and random state are restored at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fpgm.errors import ForwardError, ModelError
from fpgm.tracing import labels as lb
from fpgm.tracing import shape_inference
from fpgm.tracing.labels import Fields
from fpgm.tracing.names_in_code import CodeNames, is_dropout
from fpgm.tracing.operator_log import OperatorLog, record_operators, return_input
from fpgm.tracing.ops import registry as rules
from fpgm.tracing.repeated_pass import is_repeat
from fpgm.tracing.trace_values import (
    Balance,
    Factor,
    FixedSizeOp,
    FreezeConstraint,
    GroupedOp,
    InsertionPoint,
    Join,
    Move,
    OpCost,
    ParameterInfo,
    ParameterSum,
    Place,
    RoleMark,
)
from fpgm.tracing.tracer import RuleError, Tracer
from fpgm.utils.adapter_spec import Adapter, Side
from fpgm.utils.example_inputs import Example, batch_size, resize_batch, tensors_in
from fpgm.utils.kept_weights import KeptWeights
from fpgm.utils.modules import (
    MODULE_ATTRIBUTES,
    all_modules,
    module_at,
    modules_by_path,
    named_tensors,
)
from fpgm.utils.outputs import read_outputs
from fpgm.utils.parameter_roles import Role
from fpgm.utils.preserve_state import ModelState, preserve_state
from fpgm.utils.rng import seed_torch
from fpgm.utils.tracebacks import describe_error, source_line
from fpgm.utils.weight_hooks import weight_hooks


@dataclass(frozen=True)
class Pass:
    """A forward pass that worked: its number, the mode and the arguments."""

    number: int
    training: bool
    example: Example
    repeats_eval: bool = False
    """Whether a pass in eval mode recorded the same, so that a dry run may skip it."""


class _InputLabels(NamedTuple):
    """Labels of an operator's inputs, and how much was recorded before its rule ran."""

    fields: list[Tensor]
    freeze_constraints: int
    pairs: int


class TraceRecorder(Tracer):
    """Records everything the rules report in one or several forward passes."""

    def __init__(self, model: nn.Module, values: bool = True) -> None:
        super().__init__(model, _parameter_infos(model))
        self.weights: KeptWeights | None = None
        """Keeps weights that the model's code writes into."""
        self.values = values
        """Whether heavy operators really run; else their results have a shape and no values."""
        self.shape_error: Exception | None = None
        """What an operator has raised that would raise it whatever the values are."""
        self.code = CodeNames(model)
        self.count = 1
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.meetings: list[tuple[Tensor, Tensor]] = []
        """The pairs that met at one position; others are only removed together."""
        self.freeze_constraints: list[FreezeConstraint] = []
        self.frozen: dict[tuple[Place, str], list[Tensor]] = {}
        """The fields that each operator froze, by its call and the reason."""
        self.balances: list[Balance] = []
        self.roles: list[RoleMark] = []
        self.sums: list[ParameterSum] = []
        self.op_costs: list[OpCost] = []
        self.groupings: list[GroupedOp] = []
        self.norm_groups: dict[tuple[Place, str], list[int]] = {}
        """How many channels each group norm has per group, by its call and line of code."""
        self.pairings: list[tuple[Tensor, Tensor]] = []
        self.windows: list[InsertionPoint] = []
        self.parts: dict[tuple[Join, int], Tensor] = {}
        self._unrelated_constants: set[int] = set()
        self.dropped_constants: set[int] = set()
        """Labels of axes of constants that turned out to hold no channels."""
        self.pads: list[Tensor] = []
        self._pieces: tuple[Tensor, ...] = ()
        self.insertion_points: list[InsertionPoint] = []
        self.picks: list[InsertionPoint] = []
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
        """Activations that modules cache in plain attributes, by module and name."""
        self.fixed_size_ops: dict[tuple[Place, int], FixedSizeOp] = {}
        self.logs: dict[int, OperatorLog] = {}
        """The operators of each run."""
        self.offset_reads: list[Tensor] = []
        """Labels that weights read which may not be zero where their parameters are."""
        self.crops_space = False
        """Whether an operator got a size that is not that of its own channels."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        log = self.logs.get(self.runs)
        if log is None:
            log = self.logs[self.runs] = OperatorLog(self.given)
        log.add(func, args, kwargs)
        if self.weights is not None:
            self.weights.note(func, args, kwargs)
        out = self._call(func, args, kwargs)
        log.add_results([out] if isinstance(out, Tensor) else rules.tensors((out,)))
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.values:
            return super().call(func, args, kwargs)
        out = shape_inference.infer_shape(func, args, kwargs)
        if out is not None:
            return out
        if func._schema.is_mutable and self._writes_weights(args):
            raise shape_inference.ValuesNeededError  # initialized from its first input
        try:
            return super().call(func, args, kwargs)
        except Exception as error:
            if shape_inference.depends_on_shapes_only(func):
                self.shape_error = error
            raise

    def on_rule_error(self, func: Any, args: tuple[Any, ...], out: Any, error: Exception) -> None:
        rules.give_up(self, f"the rule for '{rules.name_of(func)}' failed ({error!r})", args, out)

    def note_read_by(self, weight: Tensor, labels: Tensor) -> None:
        if self.is_lifted(weight) or not self.is_constant(weight):
            self.offset_reads.append(labels)

    def on_values_leave(self, tensor: Tensor, method: str) -> None:
        if not self.values:
            raise shape_inference.ValuesNeededError
        super().on_values_leave(tensor, method)

    def _writes_weights(self, args: tuple[Any, ...]) -> bool:
        info = self.parameter_infos.get(id(args[0])) if args else None
        return info is not None and info.trainable

    def new_labels(self, count: int) -> Tensor:
        start = self.count
        self.count += count
        return torch.arange(start, self.count)

    def constant_labels(self, count: int) -> Tensor:
        labels = self.new_labels(count)
        self._unrelated_constants.update(labels.tolist())
        return labels

    def drop_constant(self, field: Tensor) -> bool:
        labels = set(field.reshape(-1).tolist())
        if not labels <= self._unrelated_constants:
            return False
        self.dropped_constants |= labels
        for tensor in self._states.live_tensors():
            fields = self.fields(tensor)
            kept = [f for f in fields if not labels.issuperset(f.reshape(-1).tolist())]
            if len(kept) < len(fields):
                self.set(tensor, kept)
        return True

    def _note_constants_used(self, fields: Iterable[Tensor]) -> None:
        """Note that labels met others or were frozen: constants among them are not dropped."""
        if self._unrelated_constants:
            for f in fields:
                self._unrelated_constants.difference_update(f.reshape(-1).tolist())

    def fixed_labels(self, number: int, count: int) -> Tensor:
        labels = self.new_labels(count)
        self.freeze([labels], "a part of fixed size is concatenated")
        self.parts[self.current_concat(), number] = labels
        return labels

    def relate(self, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            a, b = torch.broadcast_tensors(a, b)
        if a is not b:
            self._note_constants_used((a, b))
            self.pairs.append((a.reshape(-1), b.reshape(-1)))
            self.meetings.append(self.pairs[-1])

    def tie(self, field: Tensor, dims: Sequence[int]) -> None:
        for dim in dims:
            if field.shape[dim] > 1:
                self._note_constants_used([field])
                first = field.narrow(dim, 0, 1).expand(field.shape)
                self.pairs.append((field.reshape(-1), first.reshape(-1)))

    def note_stack(self, rows: Tensor) -> None:
        self._stack_count += 1
        for row in rows.tolist():
            for position, label in enumerate(row):
                self._stacks.setdefault(label, set()).add((self._stack_count, position))

    def are_stacked(self, a: Tensor, b: Tensor) -> bool:
        one, other = (self._stacks.get(int(label), set()) for label in (a, b))
        return not one.isdisjoint(other)

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        if fields:
            self._note_constants_used(fields)
            where = self.where()
            full_reason = f"{reason} in {where}"
            for f in fields:
                self.freeze_constraints.append(FreezeConstraint(f.reshape(-1), full_reason, soft))
            self.frozen.setdefault((self.current_call(self.module), full_reason), []).extend(fields)

    def labels_of(self, inputs: Sequence[Tensor]) -> _InputLabels:
        fields = [f for x in inputs for f in self._existing_labels(x)]
        return _InputLabels(fields, len(self.freeze_constraints), len(self.pairs))

    def _existing_labels(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the labels a tensor already has, without giving a parameter new ones."""
        info = self.parameter_infos.get(id(tensor))
        return () if info is not None and not info.has_labels else self.fields(tensor)

    def check_passed(self, name: str, carried: _InputLabels, out: Any) -> None:
        """Freeze labels that were lost: consumers of the result may depend on them."""
        if not carried.fields:
            return
        passed = [f for result in rules.tensors((out,)) for f in self._existing_labels(result)]
        same = set(map(id, passed))
        missing = [f for f in carried.fields if id(f) not in same]
        if not missing:
            return
        places = {f.data_ptr() for f in passed}
        missing = [f for f in missing if f.data_ptr() not in places]
        if not missing:
            return
        freeze_constraints, pairs = (
            self.freeze_constraints[carried.freeze_constraints :],
            self.pairs[carried.pairs :],
        )
        known = [
            *passed,
            *(s.labels for s in freeze_constraints),
            *(side for pair in pairs for side in pair),
        ]
        is_known = np.zeros(self.count, dtype=np.bool_)
        for f in known:
            is_known[f.numpy()] = True
        lost = [f for f in missing if not is_known[f.numpy()].any()]
        self.freeze(lost, f"'{name}' does not pass them on")

    def balance(self, blocks: Tensor, whole: bool = True) -> None:
        if blocks.shape[0] > 1:
            if not self._unrelated_constants.issuperset(blocks.reshape(-1).tolist()):
                self._note_constants_used([blocks])
            self.balances.append(Balance(blocks, whole))

    def note_role(self, field: Tensor, role: Role, weight: Tensor) -> None:
        self.roles.append(RoleMark(field.reshape(-1), role, self.source_parameters(weight)))

    def note_sum_term(self, out: Tensor, part: Tensor, terms: Sequence[Tensor]) -> None:
        parameter_ids = frozenset().union(*map(self.source_parameters, terms))
        out, part = torch.broadcast_tensors(out, part)
        if out is not part:
            self.sums.append(ParameterSum(out.reshape(-1), part.reshape(-1), parameter_ids))

    def note_padding(self, ends: Sequence[Tensor]) -> None:
        self.pads += ends
        self.note_piece_sizes(ends)

    def note_piece_sizes(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = tuple(piece.reshape(-1) for piece in pieces)

    def note_cost(self, times: int, factors: Sequence[tuple[Fields, Sequence[int]]]) -> None:
        if not self.passes:
            self.op_costs.append(OpCost(times, tuple(Factor(f, tuple(s)) for f, s in factors)))

    def pair_groups(self, ins: Tensor, outs: Tensor) -> None:
        self.pairings.append((ins, outs))

    def note_grouped_op(self, blocks: Tensor) -> None:
        self.groupings.append(GroupedOp(self.module, blocks))

    def note_norm_group(self, size: int) -> None:
        self.norm_groups.setdefault((self.current_call(self.module), source_line()), []).append(
            size
        )

    def slide_along_channels(self, dim: int, labels: Tensor) -> bool:
        if not self.module or not isinstance(
            module_at(self.model, self.module), nn.modules.conv._ConvNd
        ):
            return False
        self.windows.append(InsertionPoint(self.module, dim, labels))
        return True

    def on_module_return(self, path: str, out: Any) -> None:
        if isinstance(out, Tensor):
            self.returns[self.current_call(path)] = Factor(self.fields(out), tuple(out.shape))

    def note_fixed_size_op(
        self, out: Tensor, source: Tensor | None, dims: Sequence[int] | None
    ) -> None:
        known = Factor(self.fields(out), tuple(out.shape))
        origin = None if source is None else Factor(self.fields(source), tuple(source.shape))
        even = len({len(piece) for piece in self._pieces}) <= 1  # chunk may leave a shorter rest
        fields = (*known.fields, *(origin.fields if origin is not None else ()))
        flat = all(len(lb.axes(f)) < 2 for f in fields)  # merging several may change their order
        safe = even and flat and (self.call_context.derives_sizes or self._infers_size(known))
        if dims is not None and not any(lb.varies(f, dims) for f in fields):
            safe = self.crops_space = True  # but the size may be another tensor's width
            self.logs[self.runs].fix_sizes()
        self.fixed_size_ops[self.next_fixed_size_op()] = FixedSizeOp(
            known, origin, self._pieces, safe, source_line()
        )
        self._pieces = ()

    def _infers_size(self, out: Factor) -> bool:
        """Tell whether code infers the size along the only labelled axis: `view(b, -1, 1, 1)`."""
        used = [lb.axes(f) for f in out.fields]
        if len(used) != 1 or not self.call_context.infers_size_along(used[0][0]):
            return False
        others = [n for d, n in enumerate(out.shape) if d not in (0, used[0][0])]
        return all(n == 1 for n in others)  # a larger one may be another tensor's width

    def carry_through_adapter(self, adapter: Adapter, x: Tensor, out: Tensor) -> Tensor | None:
        changed = super().carry_through_adapter(adapter, x, out)
        self.logs[self.runs].pass_on(x, out if changed is None else changed)
        return changed

    def place(self, adapter: Adapter, labels: Tensor | None, zero: bool) -> tuple[Tensor, Tensor]:
        stream = self.new_labels(adapter.size)
        self.freeze([stream], "an adapter of an earlier plan keeps the full width")
        if labels is not None and not zero:
            self.freeze([labels], "zeroed channels would not be zero where an adapter places them")
        return self._record_move(Move(adapter, _or_empty(labels), stream=stream)), stream

    def pick(self, adapter: Adapter, labels: Tensor | None, wide: Tensor | None) -> Tensor:
        if labels is not None and len(labels) == 1:
            self.freeze([labels], "an adapter picks one channel by position")
        return self._record_move(Move(adapter, _or_empty(labels), wide))

    def _record_move(self, move: Move) -> Tensor:
        """Record what an adapter moves; it moves the same channels at every call."""
        place = move.adapter.module, move.adapter.side
        first = self._first_moves.setdefault(place, move)
        for a, b in ((first.labels, move.labels), (first.wide, move.wide)):
            if a is not None and b is not None and len(a) == len(b):
                self.relate(a, b)
            elif (a is None or not len(a)) != (b is None or not len(b)):
                both = [labels for labels in (a, b) if labels is not None and len(labels)]
                self.freeze(both, "an adapter moves them in some runs only")
        self.moves[self.current_call(move.adapter.module), move.adapter.side] = move
        return move.labels

    def find_cached(self) -> None:
        """Look for activations in the attributes of modules, after a forward pass."""
        for path, module in modules_by_path(self.model).items():
            if type(module).__module__.startswith("torch.nn."):
                continue  # torch's own modules cache none
            computed = {name for name, _ in weight_hooks(module)}
            for name, value in vars(module).items():
                if name in MODULE_ATTRIBUTES or name in computed or type(value) in _NUMBERS:
                    continue
                for tensor in tensors_in(value) if _may_hold(value) else ():
                    if id(tensor) not in self.parameter_infos and (fields := self.fields(tensor)):
                        factors = self.cached.setdefault((path, name), [])
                        factors.append(Factor(fields, tuple(tensor.shape)))

    def unreached_parameters(self) -> list[str]:
        """List trainable parameters that no operator has used."""
        return [
            info.name
            for info in self.parameter_infos.values()
            if info.trainable and not info.has_labels
        ]


_NUMBERS = frozenset((int, float, bool, str, type(None)))


def _may_hold(value: Any) -> bool:
    return isinstance(value, Tensor | list | tuple | dict | set | deque)


def record_trace(
    recorder: TraceRecorder, examples: Sequence[Example], keep_outputs: bool = True
) -> TraceRecorder:
    """Run every example and record the passes; the model is left as it was.

    Train mode is recorded too, unless the model's code cannot depend on the mode: a size that
    only training uses (an auxiliary head, noise of a fixed shape) must fit the compact model.
    """
    model = recorder.model
    with preserve_state(model, watched=False) as before:
        recorder.weights = before.weights
        with recorder.hooks_installed():
            failed = record_eval_passes(recorder, examples, keep_outputs)
        if failed and not recorder.values:
            raise failed[0][1]  # whether it works depends on values
        recorder.find_cached()
        missing = recorder.unreached_parameters()
        if (
            not missing
            and not failed
            and (not recorder.code.may_depend_on_mode or _train_matches_eval(recorder, before))
        ):
            return recorder
        before.restore()
        with recorder.hooks_installed():
            worked = _record_training_passes(recorder, examples, keep_outputs, missing)
        for example, error in failed:
            if not any(example is one for one in worked):
                raise error
        recorder.find_cached()
    return recorder


def _train_matches_eval(recorder: TraceRecorder, before: ModelState) -> bool:
    """Tell whether train mode runs the operators of eval mode, apart from dropout."""
    if recorder.code.changes_mode:
        before.restore()  # its own eval() may have changed more than train() changes back
    try:
        recorder.model.train()
        for module in all_modules(recorder.model):
            if is_dropout(module):  # other code may read its mode
                module.__dict__["forward"] = return_input
    except Exception:  # the model's own code may raise anything
        return False
    return all(_train_pass_matches(recorder, one) for one in recorder.passes)


def _train_pass_matches(recorder: TraceRecorder, one: Pass) -> bool:
    """Tell whether an example runs the same operators in train mode; with two where one fails."""
    with recorder.weights or nullcontext():
        return _runs_same(recorder, one)


def _runs_same(recorder: TraceRecorder, one: Pass) -> bool:
    log = record_operators(recorder.model, one.example)
    resized = log is None and batch_size(one.example) == 1
    if resized:
        log = record_operators(recorder.model, resize_batch(one.example, 2))
    return log is not None and log.is_same(recorder.logs[one.number], sizes_may_differ=resized)


def record_eval_passes(
    recorder: TraceRecorder, examples: Sequence[Example], keep_outputs: bool = True
) -> list[tuple[Example, ForwardError]]:
    """Run the examples in eval mode; return those that fail, or raise if all of them do."""
    if recorder.code.changes_mode or any(m.training for m in all_modules(recorder.model)):
        try:
            recorder.model.eval()
        except Exception as cause:  # the model's own code; that of torch.export always raises
            raise ModelError(f"The model's own eval() fails: {describe_error(cause)}.") from cause
    failed = []
    for example in examples:
        error = _run_or_error(_run, recorder, example, keep_outputs)
        if error is None:
            recorder.passes.append(Pass(recorder.runs, False, example))
            continue
        failed.append((example, error))
        if not recorder.passes:
            recorder.op_costs.clear()
    if not recorder.passes:
        raise failed[0][1]
    return failed


def _record_training_passes(
    recorder: TraceRecorder, examples: Sequence[Example], keep_outputs: bool, missing: Sequence[str]
) -> list[Example]:
    """Run the examples in train mode; return those that work there."""
    try:
        recorder.model.train()
    except Exception as error:  # the model's own code may raise anything
        _freeze_unreached(recorder, missing, describe_error(error))
        return []
    errors = [_run_or_error(_run_training, recorder, example, keep_outputs) for example in examples]
    worked = [example for example, e in zip(examples, errors, strict=True) if e is None]
    if not worked:
        _freeze_unreached(recorder, missing, str(errors[0]))
    return worked


def _run_or_error(
    run: Callable[[TraceRecorder, Example, bool], None],
    recorder: TraceRecorder,
    example: Example,
    keep_outputs: bool,
) -> ForwardError | None:
    try:
        run(recorder, example, keep_outputs)
    except ForwardError as error:
        return error
    return None


def _run_training(recorder: TraceRecorder, example: Example, keep_outputs: bool) -> None:
    """Run one example in train mode, with a batch of two where batch norm needs that."""
    try:
        _run_without_values(recorder, example, keep_outputs)
    except ForwardError as error:
        if batch_size(example) != 1 or not _needs_batch(error):
            raise
        example = resize_batch(example, 2)
        _run_without_values(recorder, example, keep_outputs)
    before = [one.number for one in recorder.passes if not one.training]
    same = any(is_repeat(recorder, recorder.runs, number) for number in before)
    recorder.passes.append(Pass(recorder.runs, True, example, same))


def _run_without_values(recorder: TraceRecorder, example: Example, keep_outputs: bool) -> None:
    """Run with shapes only, or with values if the model's code reads them."""
    values = recorder.values
    try:
        recorder.values = False
        seed_torch(0)
        _run(recorder, example, keep_outputs)
    except (ForwardError, shape_inference.ValuesNeededError) as error:
        if isinstance(error, ForwardError) and (
            _needs_batch(error) or error.__cause__ is recorder.shape_error
        ):
            raise
        recorder.values = True
        seed_torch(0)
        _run(recorder, example, keep_outputs)
    finally:
        recorder.values = values


def _needs_batch(error: ForwardError) -> bool:
    return "more than 1 value per channel" in str(error.__cause__)


def _freeze_unreached(recorder: TraceRecorder, missing: Sequence[str], why: str) -> None:
    """Freeze what is used only in training, where no example runs to completion."""
    recorder.notes.append(f"Train mode could not be traced: {why}")
    for info in recorder.parameter_infos.values():
        if info.name in missing:
            for f in info.fields:
                recorder.freeze_constraints.append(
                    FreezeConstraint(f.reshape(-1), "they are used only in training", False)
                )


def _run(recorder: TraceRecorder, example: Example, keep_outputs: bool) -> None:
    try:
        out = recorder.run(example)
    except (RuleError, ModelError):  # not the forward: its outputs are unsupported
        raise
    except Exception as error:
        raise ForwardError(
            f"The model's own forward fails on the example input: {describe_error(error)}."
            f"{_dtype_hint(recorder, example)}"
        ) from error
    if out is None and not recorder.model.training:
        raise ModelError("The model's forward returns None: let it return its outputs.")
    leaves = read_outputs(out)
    if recorder.runs in recorder.logs:
        recorder.logs[recorder.runs].end(leaves)
    returned = [leaf.value for leaf in leaves if leaf.is_tensor]
    results = [tensor for tensor in returned if tensor.numel()]
    recorder.recognize(results)
    recorder.results[recorder.runs] = [Factor(recorder.fields(t), tuple(t.shape)) for t in results]
    if keep_outputs:
        for tensor in returned:  # no boxes are found, but each would have its four numbers
            for f in recorder.fields(tensor):
                recorder.freeze_constraints.append(
                    FreezeConstraint(f.reshape(-1), "the model's output", False)
                )
    elif not recorder.passes:
        recorder.outputs = recorder.results[recorder.runs]


def _dtype_hint(recorder: TraceRecorder, example: Example) -> str:
    """Name both dtypes if they differ: torch's own error rarely does."""
    weights = {p.dtype for p in recorder.model.parameters() if p.is_floating_point()}
    given = {
        t.dtype for t in tensors_in((example.args, dict(example.kwargs))) if t.is_floating_point()
    }
    if not weights or not given or given <= weights:
        return ""
    have, want = (
        ", ".join(sorted(str(d).removeprefix("torch.") for d in kinds))
        for kinds in (given, weights)
    )
    return f" The example is {have}, the weights are {want}: convert one of them."


def _or_empty(labels: Tensor | None) -> Tensor:
    return torch.zeros(0, dtype=torch.int64) if labels is None else labels


def _parameter_infos(model: nn.Module) -> dict[int, ParameterInfo]:
    return {
        id(tensor): ParameterInfo(name, tuple(tensor.shape), isinstance(tensor, nn.Parameter))
        for name, tensor in named_tensors(model).items()
        if tensor.layout == torch.strided  # a sparse adjacency matrix stays whole
    }
