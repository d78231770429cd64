"""`Planner`: a model watched once, from which plans are drawn while its weights change.

A plan is drawn by choosing, writing the choice down and replaying the smaller network; what does
not follow is frozen and the choice is made again. What `fpgm.plan` takes, and what it makes of it,
is `workflow.api`.
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
from fpgm.planning.budget import ALIGN, Budget, Measure, Rounder, Rounding, check_patterns
from fpgm.planning.dry_run import needs_replay, replay
from fpgm.planning.dry_run_tracer import MismatchError
from fpgm.planning.equal_split import components
from fpgm.planning.plan_builder import EmptiedError, UnevenError
from fpgm.planning.precomputed_scores import Scored
from fpgm.planning.repair import find_difference, find_failing, runs_alike
from fpgm.planning.selection import Choice, ErrorOf, Selector
from fpgm.planning.size_attributes import Attributes
from fpgm.planning.unit_scores import UnitScores
from fpgm.pruning.compaction import fingerprint
from fpgm.pruning.plan import Attribute, Plan
from fpgm.pruning.verification import certify
from fpgm.tracing.cost_model import Cost, Costs
from fpgm.tracing.grouping import Pool, Structure, couple, frozen_rows
from fpgm.tracing.recorder import Watch, watch
from fpgm.tracing.residual import Residual, watcher
from fpgm.tracing.shape_inference import ValuesNeededError
from fpgm.utils.example_inputs import as_examples
from fpgm.utils.modules import named_tensors, tensors_sha256, unwrapped, walk_once

Criterion = str | Callable[[Tensor], Tensor] | Scored

_MOST_REPLAYS = 1000
"""Every replay freezes something or tries another attribute; this only stops a fault of ours."""

_TIMED_STEPS = 2
"""For a budget in time narrow layers are aligned too: an odd width costs its neighbours as well,
in copies from one order of channels to another, which no table of single layers tells."""


@dataclass(frozen=True)
class Drawn:
    """A plan and the units it removes, by the planner's own numbers."""

    plan: Plan
    removed: Tensor


class Planner:
    """A model watched once, of which plans can be drawn again while its weights change.

    Takes the arguments of `plan`, the budget as a value.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        *,
        budget: Budget,
        criterion: Criterion = "fpgm",
        distance: str = "l2",
        residual: Residual = "coupled",
        ignore: Sequence[str] = (),
        align: int = ALIGN,
        rounding: Rounding = "nearest",
        min_channels: int = 1,
        approximate: bool = False,
        keep_outputs: bool = True,
        seed: int = 0,
    ) -> None:
        model = check_model(model)
        if isinstance(ignore, str):
            raise RequestError(f"ignore is the text {ignore!r}: give a list of patterns.")
        if residual not in ("coupled", "independent"):
            raise RequestError(f"residual is {residual!r}: give 'coupled' or 'independent'.")
        self.model = model
        self.budget = budget
        steps = Rounder.steps if budget.latency is None else _TIMED_STEPS
        self.rounder = Rounder(align, rounding, min_channels, steps)
        if not isinstance(criterion, Scored):  # refuse a bad name at once
            criteria.resolve(criterion, distance=distance, seed=seed)
        self.criterion, self.distance, self.seed = criterion, distance, seed
        self.examples = as_examples(example_inputs)
        with walk_once(model):
            self.structure = couple(self._watch(residual, keep_outputs), approximate)
        seen = self.structure.seen
        self.examples = [p.example for p in seen.passes if not p.training]
        layers = [w.layer for w in self.structure.writers]
        check_patterns("rates", list(budget.rates), layers)
        check_patterns("ignore", list(ignore), layers)
        _ignore(self.structure, ignore)
        self.error_of: ErrorOf | None = None
        """Output error by how many units of a pool go; if known, rates are chosen by it."""
        self.certifies = False
        """Whether every plan is certified as it is drawn."""
        self.latency_of: Callable[[Structure], Cost] | None = None
        """Predicts latency; needed for budgets in time."""
        self._known = frozenset(self.structure.reasons)
        self.asked = {
            "criterion": _name(criterion),
            "distance": distance,
            "residual": residual,
            "align": align,
            "rounding": rounding,
        }

    def _watch(self, residual: Residual, keep_outputs: bool) -> Watch:
        """Watch with shapes alone, which is faster; with values where the model looks at them."""
        try:
            return self._watch_with(False, residual, keep_outputs)
        except (ForwardError, ValuesNeededError):
            return self._watch_with(True, residual, keep_outputs)

    def _watch_with(self, values: bool, residual: Residual, keep_outputs: bool) -> Watch:
        seen = watcher(self.model, self.examples, residual, values)
        return watch(seen, self.examples, keep_outputs)

    @property
    def learned(self) -> list[tuple[int, str]]:
        """Units that drawing found it must leave alone, by their numbers, and why."""
        reasons = self.structure.reasons
        return [(unit, reason) for unit, reason in reasons.items() if unit not in self._known]

    def learn(self, found: Sequence[tuple[int, str]]) -> None:
        """Leave alone what an earlier planner of the same model found it must."""
        for unit, reason in found:
            self.structure.freeze(torch.tensor([unit]), reason)

    def draw(
        self, share: float = 1.0, first: Tensor | None = None, certified: bool = False
    ) -> Drawn:
        """Build a plan from the weights as they are, for a fraction of the budget.

        Chooses, writes down, and runs the smaller model until its own code follows the sizes.

        Args:
            share: Fraction of the budget to spend.
            first: Units that go before all others.
            certified: Compare outputs too, freeze the groups that make them differ, plan again.
        """
        with walk_once(self.model):
            return self._draw(self.budget.scaled(share), first, certified or self.certifies)

    def _draw(self, budget: Budget, first: Tensor | None, certified: bool) -> Drawn:
        asked = {**budget.asked(), **self.asked}
        if self.error_of is not None:
            asked["allocate"] = "sensitivity"
        selector = self._selector(first)
        structure = self.structure
        attributes = Attributes(self.model, structure)
        certified = certified or structure.seen.uncertain
        tolerated: set[Any] = set()
        for _ in range(_MOST_REPLAYS):
            if not structure.pools:
                raise ModelError(_nothing(structure))
            choice = selector.choose(budget)
            check = partial(self._checked, asked=asked, attributes=attributes, tolerated=tolerated)
            try:
                made = check(choice)
                doubtful = certified or self._looks_wrong(made)
                difference = self._find_difference(made) if doubtful else None
                if difference is None:
                    return Drawn(made, choice.removed)
                blamed = self._find_failing(choice, check)
                structure.freeze(blamed, f"the compact model would be wrong: {difference}")
            except EmptiedError as emptied:
                structure.freeze(
                    selector.dearest(emptied.classes),
                    "a later layer would have nothing left to read",
                )
            except UnevenError as uneven:
                structure.freeze(
                    _pool_units(structure, uneven.classes), "its groups cannot shrink alike"
                )
            except MismatchError as mismatch:
                left = attributes.mend(mismatch)
                if left is None:
                    continue
                if left.may_wait:
                    tolerated.add(left.place)
                else:
                    blamed = _blamed(structure, left.classes)
                    if not len(blamed):  # labels cannot tell what is wrong: outputs do
                        made = attributes.draft(choice, asked)
                        if self._find_difference(made) is None:
                            return Drawn(made, choice.removed)
                        blamed = self._find_failing(choice, check)
                    structure.freeze(blamed, left.reason)
        raise ModelError(
            "No plan could be made to fit the model's own code; please report this model."
        )

    def _looks_wrong(self, made: Plan) -> bool:
        """Run once, if code may use a width as a number: a certificate then says what is wrong.

        So it may where it computes with sizes or compares them, and where it may read an attribute
        that still says an old width.
        """
        code = self.structure.seen.code
        may = code.may_compute_with_sizes or any(code.may_read(s.name) for s in made.stale)
        return may and not runs_alike(self.model, made, self.examples[0])

    def _find_difference(self, made: Plan) -> str | None:
        return find_difference(self.model, made, self.examples)

    def _find_failing(self, choice: Choice, check: Callable[[Choice], Plan]) -> Tensor:
        """Find the units for which outputs differ, trying the groups of a choice apart."""
        structure = self.structure
        nothing = choice.removed[:0]

        def fails(parts: Sequence[Tensor]) -> bool:
            try:
                made = check(Choice.of(structure, torch.cat([nothing, *parts])))
            except (MismatchError, EmptiedError, UnevenError):
                return True
            return self._find_difference(made) is not None

        if fails([]):
            made = check(Choice.of(structure, nothing))
            raise VerificationError(f"Nothing can be certified: {self._explain(made)}")
        units = [part.units for part in components(structure.pools, structure.balances)]
        chosen = [own[torch.isin(own, choice.removed)] for own in units]
        removing = [i for i, own in enumerate(chosen) if len(own)]
        failing = find_failing(removing, lambda some: fails([chosen[i] for i in some]))
        return torch.cat([units[i] for i in failing])

    def _explain(self, made: Plan) -> str:
        """Say in full why even a plan that removes nothing is not certified."""
        try:
            certify(self.model, made, self.examples).check()
        except VerificationError as error:
            return str(error)
        return "the model's own outputs differ from one run to the next."

    def choose(self, budget: Budget) -> Choice:
        """What would go for a budget, by the weights as they are; the model's code is not asked."""
        return self._selector(None).choose(budget)

    def score_by(self, criterion: Criterion) -> None:
        """From now on choose by another criterion."""
        self.criterion = criterion
        self.asked["criterion"] = _name(criterion)

    def order(self, pool: Pool) -> Tensor:
        """Sort a pool's units by their scores: those that go first come first."""
        return self._selector(None).order(pool)

    def score_key(self) -> dict[str, str]:
        """Name all that decides in which order units go: the model, its weights, the options."""
        asked = {key: str(self.asked[key]) for key in ("criterion", "distance", "residual")}
        weights = tensors_sha256(self.model)
        return {"model": fingerprint(self.model), "set of weights": weights[:16], **asked}

    def _selector(self, first: Tensor | None) -> Selector:
        return Selector(
            self.structure,
            UnitScores(self.model, self.structure, self._scorer_of, self.criterion == "bn"),
            self.rounder,
            self._cost,
            first=first,
            error_of=self.error_of,
        )

    def _cost(self, measure: Measure) -> Cost:
        if measure != "latency":
            return Costs(self.structure, measure)
        if self.latency_of is None:
            raise RequestError("latency= is measured as a plan is made: give it to fpgm.plan.")
        return self.latency_of(self.structure)

    def _checked(
        self,
        choice: Choice,
        asked: Mapping[str, Any],
        attributes: Attributes,
        tolerated: set[Any],
    ) -> Plan:
        """The choice as a plan the model's own code can follow, or `MismatchError`."""
        model, structure, examples = self.model, self.structure, self.examples
        found = attributes.draft(choice, asked)
        if needs_replay(structure, choice.removed):
            adapters, doubt = replay(model, structure, found, choice.removed, tolerated)
            replaced = {(a.module, a.side) for a in adapters}
            drafted = (a for a in found.adapters if (a.module, a.side) not in replaced)
            found = replace(found, adapters=(*drafted, *adapters))
            if doubt is not None and not certify(model, found, examples).ok:
                raise doubt
        return self._follow(found, choice.removed, attributes, tolerated)

    def _follow(
        self, found: Plan, removed: Tensor, attributes: Attributes, tolerated: set[Any]
    ) -> Plan:
        """Let further sizes that modules remember follow the plan, as far as outputs stay."""

        def holds(trial: Plan) -> bool:
            try:
                adapters, _ = replay(self.model, self.structure, trial, removed, tolerated)
            except MismatchError:
                return False
            return set(adapters) <= set(found.adapters) and self._find_difference(trial) is None

        together, *apart = attributes.readable(found, removed) or [[]]
        if together and holds(trial := _with_attributes(found, together)):
            return trial
        if attributes.doubtful and self._find_difference(found) is not None:
            raise MismatchError("outputs would differ", [], wrong_outputs=True)
        for some in apart:
            trial = _with_attributes(found, some)
            found = trial if holds(trial) else found
        return found

    def _scorer_of(self, layer: str) -> criteria.Scorer:
        if isinstance(self.criterion, Scored):
            return self.criterion.scorer(layer)
        # A seed of its own, or random would pick the same positions in every layer of one width.
        seed = self.seed + crc32(layer.encode())
        return criteria.resolve(self.criterion, distance=self.distance, seed=seed)


def _with_attributes(plan: Plan, more: Sequence[Attribute]) -> Plan:
    """The plan with attributes that it had listed as still saying an old width."""
    places = {(a.module, a.name) for a in more}
    stale = tuple(s for s in plan.stale if (s.module, s.name) not in places)
    return replace(plan, attributes=(*plan.attributes, *more), stale=stale)


def check_model(model: nn.Module) -> nn.Module:
    """The module inside its wrappers; what is none, or has no weights yet, is refused."""
    if not isinstance(model, nn.Module):
        raise RequestError(f"model is a {type(model).__name__}: give a torch.nn.Module.")
    model = unwrapped(model)
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
    return model


def _ignore(structure: Structure, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        chosen = [w.classes for w in structure.writers if fnmatch.fnmatchcase(w.layer, pattern)]
        structure.freeze(torch.cat(chosen), f"ignored on request ({pattern!r})")


def _blamed(structure: Structure, classes: Tensor) -> Tensor:
    """Units to leave alone after a mismatch, the fewest first.

    Where a zero-padded shortcut meets a branch it is the padding that cannot shrink; otherwise
    all pools involved stay. None if no pool is known to be involved.
    """
    units = _pool_units(structure, classes)
    if structure.seen.pads and len(units):
        padding = _pool_units(structure, structure.of(torch.cat(structure.seen.pads)))
        both = units[torch.isin(units, padding)]
        units = both if len(both) else units
    return units


def _pool_units(structure: Structure, classes: Tensor) -> Tensor:
    """All units of the pools these classes belong to."""
    touched = [p.units for p in structure.pools if bool(torch.isin(p.units, classes).any())]
    return torch.cat(touched) if touched else torch.zeros(0, dtype=torch.int64)


def _nothing(structure: Structure) -> str:
    """Why no unit is left, with the reason that holds for the most channels."""
    rows = sorted(frozen_rows(structure), key=lambda row: -row[1])
    why = f" Most stay for this reason: {rows[0][2]}." if rows else ""
    return f"There is nothing to prune: no layer has a unit that can go.{why}"


def _name(criterion: Criterion) -> str:
    if isinstance(criterion, Scored):
        return criterion.name
    return criterion if isinstance(criterion, str) else getattr(criterion, "__name__", "custom")
