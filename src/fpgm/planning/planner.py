"""`Planner`: trace a model once and build plans while its weights change.

To build a plan, it selects units, builds the cuts, and dry-runs the smaller network. Units whose
removal the model's code does not support are frozen, and the selection is repeated. `fpgm.plan`
itself is in `workflow.api`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fpgm import criteria
from fpgm.errors import ForwardError, ModelError, RequestError, VerificationError
from fpgm.planning.budget import Budget, Measure, check_patterns
from fpgm.planning.dry_run import DryRun, dry_run, needs_dry_run
from fpgm.planning.dry_run_tracer import MismatchError
from fpgm.planning.equal_split import components
from fpgm.planning.failing_groups import find_difference, find_failing, runs_alike
from fpgm.planning.options import DEFAULTS, Criterion, PlanOptions, criterion_name
from fpgm.planning.plan_builder import EmptyAxisError, UnevenBlocksError
from fpgm.planning.precomputed_scores import PrecomputedScores
from fpgm.planning.selection import Choice, ErrorOf, Selector
from fpgm.planning.size_attributes import SizeAttributes
from fpgm.planning.unit_scores import UnitScores
from fpgm.planning.width_rounding import Rounder
from fpgm.pruning.compaction import fingerprint, rebuild
from fpgm.pruning.plan import Attribute, Plan
from fpgm.pruning.verification import certify
from fpgm.tracing.cost_model import Cost, Costs
from fpgm.tracing.freeze_reasons import frozen_rows
from fpgm.tracing.grouping import ChannelGroup, Structure, group_channels
from fpgm.tracing.operator_log import record_operators
from fpgm.tracing.recorder import TraceRecorder, record_trace
from fpgm.tracing.residual import Residual, make_recorder
from fpgm.tracing.shape_inference import ValuesNeededError
from fpgm.utils.example_inputs import as_examples
from fpgm.utils.modules import (
    cache_modules,
    modules_by_path,
    named_tensors,
    tensors_sha256,
    unwrap_model,
)
from fpgm.utils.preserve_state import preserve_rng
from fpgm.utils.thread_lock import pause_garbage_collection, with_global_lock

_MAX_DRY_RUNS = 1000
"""Every dry run freezes something or tries another attribute; the limit only guards a bug."""

_TIMED_STEPS = 2
"""With a latency budget narrow layers are aligned too: an odd width also slows down its
neighbors by layout copies, which a table of single layers does not show."""


@dataclass(frozen=True)
class BuiltPlan:
    """A plan and the units it removes, as numbered by the planner."""

    plan: Plan
    removed: Tensor


@dataclass(frozen=True, eq=False)
class _Part:
    """Units that can be pruned without the rest, and those of them that a choice removes."""

    units: Tensor
    removed: Tensor


class Planner:
    """Traces a model once and builds plans for it while its weights change.

    Takes the budget and the other options of `plan` as values.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        *,
        budget: Budget,
        options: PlanOptions = DEFAULTS,
    ) -> None:
        model = check_model(model)
        align, criterion = options.width_multiple, options.criterion
        distance, seed = options.distance, options.seed
        self.model = model
        self.budget = budget
        steps = Rounder.steps if budget.latency is None else _TIMED_STEPS
        self.rounder = Rounder(align, options.rounding, options.min_channels, steps)
        if not isinstance(criterion, PrecomputedScores):  # reject an unknown name early
            criteria.resolve(criterion, distance=distance, seed=seed)
        self.criterion, self.distance, self.seed = criterion, distance, seed
        self.examples = as_examples(example_inputs)
        with cache_modules(model), pause_garbage_collection():
            recording = self._trace(options.residual, options.keep_outputs)
            self.structure = group_channels(recording, options.approximate)
        trace = self.structure.trace
        self.examples = [p.example for p in trace.passes if not p.training]
        layers = [w.layer for w in self.structure.producers]
        check_patterns("rates", list(budget.rates), layers)
        check_patterns("ignore", list(options.ignore), layers)
        _ignore(self.structure, options.ignore)
        self.error_of: ErrorOf | None = None
        """Output error by how many units of a group are removed; if set, it decides the rates."""
        self.certifies = False
        """Whether every plan is certified as it is built."""
        self.latency_of: Callable[[Structure], Cost] | None = None
        """Predicts latency; needed for latency budgets."""
        self._known = frozenset(self.structure.reasons)
        self._runs_alike: Plan | None = None
        """The latest plan whose compact model was found to run the original's operators."""
        self.requested = {
            "criterion": criterion_name(criterion),
            "distance": distance,
            "residual": options.residual,
            "align": align,
            "rounding": options.rounding,
        }

    def _trace(self, residual: Residual, keep_outputs: bool) -> TraceRecorder:
        """Trace with shapes alone, which is faster; with values where the model reads them."""
        try:
            return self._trace_with(False, residual, keep_outputs)
        except (ForwardError, ValuesNeededError):
            return self._trace_with(True, residual, keep_outputs)

    def _trace_with(self, values: bool, residual: Residual, keep_outputs: bool) -> TraceRecorder:
        trace = make_recorder(self.model, self.examples, residual, values)
        return record_trace(trace, self.examples, keep_outputs)

    @property
    def learned_constraints(self) -> list[tuple[int, str]]:
        """Return the units that had to be frozen while building plans, with the reasons."""
        reasons = self.structure.reasons
        return [(unit, reason) for unit, reason in reasons.items() if unit not in self._known]

    def add_constraints(self, constraints: Sequence[tuple[int, str]]) -> None:
        """Freeze what an earlier planner of the same model had to freeze."""
        for unit, reason in constraints:
            self.structure.freeze(torch.tensor([unit]), reason)

    @with_global_lock
    def build_plan(
        self, fraction: float = 1.0, first: Tensor | None = None, certified: bool = False
    ) -> BuiltPlan:
        """Build a plan from the weights as they are, for a fraction of the budget.

        Selects units and dry-runs the smaller model until its own code follows the sizes.

        Args:
            fraction: Fraction of the budget to spend.
            first: Units to remove before all others.
            certified: Compare outputs too, freeze the groups that make them differ, plan again.
        """
        with cache_modules(self.model):
            return self._build_plan(self.budget.scale(fraction), first, certified or self.certifies)

    def _build_plan(self, budget: Budget, first: Tensor | None, certified: bool) -> BuiltPlan:
        requested = {**budget.to_dict(), **self.requested}
        if self.error_of is not None:
            requested["allocate"] = "sensitivity"
        selector = self._selector(first)
        structure = self.structure
        attributes = SizeAttributes(self.model, structure)
        certified = certified or structure.trace.uncertain
        tolerated: set[Any] = set()
        for _ in range(_MAX_DRY_RUNS):
            if not structure.groups:
                raise ModelError(_nothing_to_prune(structure))
            choice = selector.choose(budget)
            check = partial(
                self._build_checked_plan,
                requested=requested,
                attributes=attributes,
                tolerated=tolerated,
            )
            try:
                plan = check(choice)
                doubtful = certified or self._adds_to_zeros(choice) or self._looks_wrong(plan)
                difference = self._find_difference(plan) if doubtful else None
                if difference is None:
                    return BuiltPlan(plan, choice.removed)
                failing = self._find_failing(choice, check)
                structure.freeze(failing, f"the compact model would be wrong: {difference}")
            except EmptyAxisError as error:
                structure.freeze(
                    selector.highest_scored(error.classes),
                    "a later layer would have no input channels left",
                )
            except UnevenBlocksError as error:
                structure.freeze(
                    _group_units(structure, error.classes), "its groups cannot shrink equally"
                )
            except MismatchError as mismatch:
                left = attributes.fix_mismatch(mismatch)
                if left is None:
                    continue
                if left.may_wait:
                    tolerated.add(left.place)
                elif len(second := _units_to_keep(left, selector, choice)):
                    structure.freeze(second, "the order of a single channel cannot be checked")
                else:
                    failing = _units_to_freeze(structure, left.classes)
                    if not len(failing):  # labels cannot tell what is wrong, but outputs can
                        plan = attributes.build_plan(choice, requested)
                        if self._find_difference(plan) is None:
                            return BuiltPlan(plan, choice.removed)
                        failing = self._find_failing(choice, check)
                    elif left.is_guess:
                        failing = self._confirm_guess(failing, choice, check)
                    structure.freeze(failing, left.reason)
        raise ModelError("No plan fits the model's own code; please report this model.")

    def _adds_to_zeros(self, choice: Choice) -> bool:
        """Tell whether computed weights may still read removed units whose parameters are zero."""
        labels = self.structure.trace.offset_reads
        if not labels:
            return False
        return bool(torch.isin(self.structure.classes_of(torch.cat(labels)), choice.removed).any())

    def _looks_wrong(self, plan: Plan) -> bool:
        """Run once, if code may use a width as a number, and tell whether outputs differ.

        It may do so where it computes with sizes or compares them, and where it may read an
        attribute that still holds an old width.
        """
        trace, code = self.structure.trace, self.structure.trace.code
        may = (
            trace.call_context.reads_sizes
            or code.may_compute_with_sizes
            or (not plan.exact and code.may_read("normalized_shape"))
            or trace.crops_space
            or any(code.may_read(s.name) for s in plan.stale)
            or self._passes_adapters_by(plan)
        )
        if not may or self._runs_as_before(plan):
            return False
        return not runs_alike(self.model, plan, self.examples[0])

    def _passes_adapters_by(self, plan: Plan) -> bool:
        """Tell whether torch's fused attention may skip modules that a plan gives adapters."""
        return bool(plan.adapters) and _has_fused_attention(self.model)

    def _note_dry_run(self, plan: Plan, result: DryRun) -> None:
        """Note whether a dry run has shown already what `_runs_as_before` would find out."""
        if result.runs_as_traced and not plan.adapters:
            self._runs_alike = plan

    @pause_garbage_collection()
    def _runs_as_before(self, plan: Plan) -> bool:
        """Tell whether the compact model runs the original's operators, with the same numbers.

        Then no code has used a width as a number, and labels show the rest.
        """
        if plan is self._runs_alike:
            return True
        if self._passes_adapters_by(plan):
            return False  # the operators belong to a different path
        before = self.structure.trace.logs
        small = rebuild(self.model, plan, values=False)
        with cache_modules(small), preserve_rng():
            for one in self.structure.trace.passes:
                if one.repeats_eval:
                    continue
                small.train(one.training)
                log = record_operators(small, one.example)
                if log is None or not log.is_same(before[one.number], sizes_may_differ=True):
                    return False
        self._runs_alike = plan
        return True

    def _find_difference(self, plan: Plan) -> str | None:
        return find_difference(self.model, plan, self.examples)

    def _find_failing(self, choice: Choice, check: Callable[[Choice], Plan]) -> Tensor:
        """Find the units that make outputs differ, trying the groups of a choice separately."""
        nothing = choice.removed[:0]

        def fails(parts: Sequence[_Part]) -> bool:
            plan = self._try_parts(parts, check)
            return plan is None or self._find_difference(plan) is not None

        if fails([]):
            plan = check(Choice.from_removed(self.structure, nothing))
            raise VerificationError(f"Nothing can be verified: {self._explain(plan)}")
        parts = [part for part in self._parts_of(choice) if len(part.removed)]
        return torch.cat([part.units for part in find_failing(parts, fails)])

    def _confirm_guess(
        self, guess: Tensor, choice: Choice, check: Callable[[Choice], Plan]
    ) -> Tensor:
        """Return the guessed units, unless others alone make the model's code fail, and they not.

        The code may fail long after the size that it fixes: the channels it saw last are a guess.
        """
        parts = self._parts_of(choice)
        guessed = [part for part in parts if bool(torch.isin(part.units, guess).any())]
        others = [part for part in parts if len(part.removed) and part not in guessed]

        def fails(some: Sequence[_Part]) -> bool:
            return self._try_parts(some, check) is None

        if fails(guessed) or not fails(others):
            return guess
        failing = find_failing(others, fails)
        return failing[0].units if len(failing) == 1 else guess

    def _parts_of(self, choice: Choice) -> list[_Part]:
        """Return the groups, joined where they must keep equally many, and what each loses."""
        parts = components(self.structure.groups, self.structure.balances)
        return [_Part(p.units, p.units[torch.isin(p.units, choice.removed)]) for p in parts]

    def _try_parts(self, parts: Sequence[_Part], check: Callable[[Choice], Plan]) -> Plan | None:
        """Build the plan that prunes these parts only; None if the model's code does not fit."""
        removed = torch.cat([torch.zeros(0, dtype=torch.int64), *(p.removed for p in parts)])
        try:
            return check(Choice.from_removed(self.structure, removed))
        except (MismatchError, EmptyAxisError, UnevenBlocksError):
            return None

    def _explain(self, plan: Plan) -> str:
        """Explain why even a plan that removes nothing is not certified."""
        try:
            certify(self.model, plan, self.examples).check()
        except VerificationError as error:
            return str(error)
        return "the model's own outputs differ from one run to the next."

    def choose(self, budget: Budget) -> Choice:
        """Select units for a budget from the weights as they are, without running the model."""
        return self._selector(None).choose(budget)

    def score_by(self, criterion: Criterion) -> None:
        """Use another criterion from now on."""
        self.criterion = criterion
        self.requested["criterion"] = criterion_name(criterion)

    def order(self, group: ChannelGroup) -> Tensor:
        """Sort a group's units by score, in order of removal."""
        return self._selector(None).order(group)

    def score_key(self) -> dict[str, str]:
        """Return what determines the order of removal: the model, its weights, the options."""
        requested = {key: str(self.requested[key]) for key in ("criterion", "distance", "residual")}
        weights = tensors_sha256(self.model)
        return {"model": fingerprint(self.model), "set of weights": weights[:16], **requested}

    def _selector(self, first: Tensor | None) -> Selector:
        return Selector(
            self.structure,
            UnitScores(
                self.model,
                self.structure,
                self._scorer_of,
                uses_scale=self.criterion == "bn",
                uses_rate=isinstance(self.criterion, str) and criteria.uses_rate(self.criterion),
            ),
            self.rounder,
            self._cost,
            first=first,
            error_of=self.error_of,
        )

    def _cost(self, measure: Measure) -> Cost:
        if measure != "latency":
            return Costs(self.structure, measure)
        if self.latency_of is None:
            raise RequestError("latency= needs measurements: pass it to fpgm.plan.")
        return self.latency_of(self.structure)

    @pause_garbage_collection()
    def _build_checked_plan(
        self,
        choice: Choice,
        requested: Mapping[str, Any],
        attributes: SizeAttributes,
        tolerated: set[Any],
    ) -> Plan:
        """Build a plan that the model's own code can follow, or raise `MismatchError`."""
        model, structure, examples = self.model, self.structure, self.examples
        plan = attributes.build_plan(choice, requested)
        if needs_dry_run(structure, choice.removed):
            result = dry_run(model, structure, plan, choice.removed, tolerated)
            replaced = {(a.module, a.side) for a in result.adapters}
            unchanged = (a for a in plan.adapters if (a.module, a.side) not in replaced)
            plan = replace(plan, adapters=(*unchanged, *result.adapters))
            if result.doubt is not None and not certify(model, plan, examples).ok:
                raise result.doubt
            self._note_dry_run(plan, result)
        return self._update_attributes(plan, choice.removed, attributes, tolerated)

    def _update_attributes(
        self, plan: Plan, removed: Tensor, attributes: SizeAttributes, tolerated: set[Any]
    ) -> Plan:
        """Update further sizes that modules store, as long as outputs stay the same."""

        def holds(trial: Plan) -> bool:
            try:  # even if it runs the same operators: a changed attribute may be another size
                result = dry_run(self.model, self.structure, trial, removed, tolerated)
            except MismatchError:
                return False
            if not set(result.adapters) <= set(plan.adapters):
                return False
            self._note_dry_run(trial, result)
            return self._runs_as_before(trial) or self._find_difference(trial) is None

        together, *apart = attributes.readable_attributes(plan, removed) or [[]]
        if together and holds(trial := _with_attributes(plan, together)):
            return trial
        if attributes.doubtful and not self._runs_as_before(plan):
            difference = self._find_difference(plan)
            if difference is not None:
                raise MismatchError("outputs would differ", [], wrong_outputs=True)
        for some in apart:
            trial = _with_attributes(plan, some)
            plan = trial if holds(trial) else plan
        return plan

    def _scorer_of(self, layer: str) -> criteria.Scorer:
        if isinstance(self.criterion, PrecomputedScores):
            return self.criterion.scorer(layer)
        # A separate seed, or random would pick the same positions in all layers of the same width.
        seed = self.seed + crc32(layer.encode())
        return criteria.resolve(self.criterion, distance=self.distance, seed=seed)


def _has_fused_attention(model: nn.Module) -> bool:
    """Tell whether torch may run some modules as one operator, without calling their submodules."""
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    return any(isinstance(module, kinds) for module in modules_by_path(model).values())


def _with_attributes(plan: Plan, more: Sequence[Attribute]) -> Plan:
    """Return the plan with attributes that it had listed as holding an old width."""
    places = {(a.module, a.name) for a in more}
    stale = tuple(s for s in plan.stale if (s.module, s.name) not in places)
    return replace(plan, attributes=(*plan.attributes, *more), stale=stale)


def check_model(model: nn.Module) -> nn.Module:
    """Return the module inside its wrappers; refuse other objects and uninitialized weights."""
    model = unwrap_model(model)
    wrappers = (base.__module__ for base in type(model).__mro__)
    if "ultralytics.engine.model" in wrappers and isinstance(model.model, nn.Module):
        name = type(model).__name__
        raise RequestError(
            f"The model is Ultralytics' {name}, which wraps the network: give {name.lower()}.model."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "The model is TorchScript (traced or scripted), which cannot be pruned: give the "
            "nn.Module it was made from."
        )
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer) or tensor.is_meta:
            raise ModelError(
                f"'{name}' has no values yet: run the model once (lazy modules) or load its "
                "weights (meta device) before pruning."
            )
        if tensor.layout != torch.strided and isinstance(tensor, nn.Parameter):
            layout = str(tensor.layout).removeprefix("torch.")
            raise ModelError(f"'{name}' is stored as {layout}: make it dense before pruning.")
    return model


def _ignore(structure: Structure, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        chosen = [w.classes for w in structure.producers if fnmatch.fnmatchcase(w.layer, pattern)]
        structure.freeze(torch.cat(chosen), f"ignored on request ({pattern!r})")


def _units_to_freeze(structure: Structure, classes: Tensor) -> Tensor:
    """Return the units to freeze after a mismatch, as few as possible.

    Where a zero-padded shortcut is added to a branch, only the padding cannot shrink; otherwise all
    groups involved are frozen. Empty if no group is known to be involved.
    """
    units = _group_units(structure, classes)
    if structure.trace.pads and len(units):
        padding = _group_units(structure, structure.classes_of(torch.cat(structure.trace.pads)))
        both = units[torch.isin(units, padding)]
        units = both if len(both) else units
    return units


def _units_to_keep(mismatch: MismatchError, selector: Selector, choice: Choice) -> Tensor:
    """Return units to keep in addition, if labels could then tell whether the plan is right."""
    if not mismatch.one_channel_left:
        return torch.zeros(0, dtype=torch.int64)
    return selector.second_units(choice, mismatch.classes)


def _group_units(structure: Structure, classes: Tensor) -> Tensor:
    """Return all units of the groups these classes belong to."""
    touched = [p.units for p in structure.groups if bool(torch.isin(p.units, classes).any())]
    return torch.cat(touched) if touched else torch.zeros(0, dtype=torch.int64)


def _nothing_to_prune(structure: Structure) -> str:
    """Explain why nothing can be pruned, with the reason that applies to the most channels."""
    rows = sorted(frozen_rows(structure.producers, structure.reasons), key=lambda row: -row[1])
    why = f" The most common reason: {rows[0][2]}." if rows else ""
    if structure.trace.nested_in:
        why = (
            f" The code uses nested tensors in {structure.trace.nested_in}, whose channels cannot "
            "be followed: pad them instead."
        )
    return f"There is nothing to prune: no layer has a unit that can be removed.{why}"
