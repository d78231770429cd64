"""`Planner`: a model watched once, from which plans are drawn while its weights change.

A plan is drawn by choosing, writing the choice down and replaying the smaller network; what does
not follow is frozen and the choice is made again. What `fpgm.plan` takes, and what it makes of it,
is `planning`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fpgm import criteria
from fpgm.attributes import Attributes
from fpgm.budget import ALIGN, Budget, Measure, Residual, Rounder, Rounding, check_patterns
from fpgm.checker import MismatchError
from fpgm.compact import fingerprint
from fpgm.costs import Cost, Costs
from fpgm.coupling import Pool, Structure, couple, frozen_rows
from fpgm.draft import EmptiedError, UnevenError, draft
from fpgm.errors import ModelError, RequestError
from fpgm.examples import as_examples
from fpgm.harm.result import Sensitivity
from fpgm.harm.sense import Sense
from fpgm.latency.aim import Clocked, Where, reach
from fpgm.latency.neighbours import Neighbours
from fpgm.plan import Plan
from fpgm.progress import Progress
from fpgm.recovery.batches import explained, moved, read_inputs
from fpgm.replay import needs_replay, replay
from fpgm.scored import Scored
from fpgm.select import Choice, Selector
from fpgm.streams import watcher
from fpgm.tensors import named_tensors, tensors_sha256, unwrapped
from fpgm.undisturbed import undisturbed
from fpgm.unit_scores import UnitScores
from fpgm.verify import certify
from fpgm.watch import watch

Criterion = str | Callable[[Tensor], Tensor] | Scored

SENSED = 512
"""Inputs that sensitivity looks at."""

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
        seen = watch(watcher(model, self.examples, residual), self.examples, keep_outputs)
        self.structure = couple(seen, approximate)
        layers = [w.layer for w in self.structure.writers]
        check_patterns("rates", list(budget.rates), layers)
        check_patterns("ignore", list(ignore), layers)
        _ignore(self.structure, ignore)
        self.sensitivity: Sensitivity | None = None
        """If there is one, rates are chosen by it."""
        self.clocked: Clocked | None = None
        """If there is one, time can be predicted."""
        self._known = frozenset(self.structure.reasons)
        self.asked = {
            "criterion": _name(criterion),
            "distance": distance,
            "residual": residual,
            "align": align,
            "rounding": rounding,
        }

    @property
    def learned(self) -> list[tuple[int, str]]:
        """Units that drawing found it must leave alone, by their numbers, and why."""
        reasons = self.structure.reasons
        return [(unit, reason) for unit, reason in reasons.items() if unit not in self._known]

    def learn(self, found: Sequence[tuple[int, str]]) -> None:
        """Leave alone what an earlier planner of the same model found it must."""
        for unit, reason in found:
            self.structure.freeze(torch.tensor([unit]), reason)

    def draw(self, share: float = 1.0, first: Tensor | None = None) -> Drawn:
        """A plan from the weights as they are, for a share of the budget; units `first` go first.

        Chooses, writes down, and replays until the model's own code follows the smaller sizes.
        """
        budget = self.budget.scaled(share)
        asked = {**budget.asked(), **self.asked}
        if self.sensitivity is not None:
            asked["allocate"] = "sensitivity"
        selector = self._selector(first)
        structure = self.structure
        attributes = Attributes(self.model, structure)
        tolerated: set[Any] = set()
        for _ in range(_MOST_REPLAYS):
            if not structure.pools:
                raise ModelError(_nothing(structure))
            choice = selector.choose(budget)
            try:
                return Drawn(self._checked(choice, asked, attributes, tolerated), choice.removed)
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
                    structure.freeze(_blamed(structure, left.classes), left.reason)
        raise ModelError(
            "No plan could be made to fit the model's own code; please report this model."
        )

    def choose(self, budget: Budget) -> Choice:
        """What would go for a budget, by the weights as they are; the model's code is not asked."""
        return self._selector(None).choose(budget)

    def score_by(self, criterion: Criterion) -> None:
        """From now on choose by another criterion."""
        self.criterion = criterion
        self.asked["criterion"] = _name(criterion)

    def timed(self, where: Where, progress: Progress | None = None) -> Plan:
        """The plan that takes away as much of the measured time as the budget asks for."""
        if not self.budget.latency:
            raise RequestError(f"latency is {self.budget.latency}: give a share above 0.")
        neighbours, asked = Neighbours(), self.budget
        self.clocked = Clocked(self.model, self.examples[0], where, self.rounder, progress)

        def drawn(budget: Budget) -> Plan:
            self.budget = budget
            return self.draw().plan

        try:
            made = reach(self.clocked, asked, drawn)
        except RequestError as error:
            if (crowd := neighbours.crowd(where.threads)) is None:
                raise
            raise RequestError(f"{error} But {crowd}: try again when they are idle.") from error
        finally:
            self.budget = asked
        if (crowd := neighbours.crowd(where.threads)) is not None:
            note = f"While times were measured {crowd}: they may be wrong."
            made = replace(made, notes=(*made.notes, note))
        return made

    def sense(
        self,
        loader: Iterable[Any],
        images: int = SENSED,
        progress: Progress | None = None,
        *,
        rates: Sequence[float] = (),
        cache: Path | None = None,
        trials: bool = True,
    ) -> Sensitivity:
        """How much harm the removal of each group's units does, in the order they would go."""
        order = self._selector(None).order
        inputs = read_inputs(moved(self.model, loader), images)
        try:
            with undisturbed(self.model), explained(self.model, inputs):
                self.model.eval()
                work = Sense(
                    self.model, self.structure, order, self._sensed, rates, cache, progress, trials
                )
                return work.run(inputs)
        finally:
            inputs.close()

    @property
    def _sensed(self) -> dict[str, str]:
        """What a sensitivity depends on."""
        kept = ("criterion", "distance", "residual")
        asked = {key: str(self.asked[key]) for key in kept}
        weights = tensors_sha256(self.model)
        return {"model": fingerprint(self.model), "set of weights": weights[:16], **asked}

    def allocate(self, sensed: Sensitivity) -> None:
        """Choose rates by what was measured, if it was measured for this."""
        if not sensed.complete:
            raise RequestError("The sensitivity was interrupted: measure on with the same file.")
        for key, value in self._sensed.items():
            if sensed.asked.get(key) != value:
                raise RequestError(
                    f"The sensitivity was measured for another {key} ({sensed.asked.get(key)}, "
                    f"not {value}): measure it again."
                )
        self.sensitivity = sensed

    def _selector(self, first: Tensor | None) -> Selector:
        sensed = self.sensitivity
        return Selector(
            self.structure,
            UnitScores(self.model, self.structure, self._scorer_of, self.criterion == "bn"),
            self.rounder,
            self._cost,
            first=first,
            harm_of=None if sensed is None else lambda p: self._harm(sensed, p),
        )

    def _cost(self, measure: Measure) -> Cost:
        if measure != "latency":
            return Costs(self.structure, measure)
        if self.clocked is None:
            raise RequestError("latency= is measured as a plan is made: give it to fpgm.plan.")
        return self.clocked.predictor(self.structure)

    def _harm(self, sensed: Sensitivity, pool: Pool) -> list[float]:
        """A pool's curve; pools written by the same first layer are told apart by their order."""
        same = [p for p in self.structure.pools if p.name == pool.name]
        which = next(i for i, p in enumerate(same) if p is pool)
        return sensed.curve(pool.name, len(pool.units), which)

    def _checked(
        self,
        choice: Choice,
        asked: Mapping[str, Any],
        attributes: Attributes,
        tolerated: set[Any],
    ) -> Plan:
        """The choice as a plan the model's own code can follow, or `MismatchError`."""
        model, structure, examples = self.model, self.structure, self.examples
        found = draft(model, structure, choice, asked, attributes.chosen)
        if not needs_replay(structure, choice.removed):
            return found
        adapters, doubt = replay(model, structure, found, choice.removed, examples, tolerated)
        mended = {(a.module, a.side, a.kind) for a in adapters if a.kind == "scatter"}
        drafted = (a for a in found.adapters if (a.module, a.side, a.kind) not in mended)
        found = replace(found, adapters=(*drafted, *adapters))
        if doubt is not None and not certify(model, found, examples).ok:
            raise doubt
        return found

    def _scorer_of(self, layer: str) -> criteria.Scorer:
        if isinstance(self.criterion, Scored):
            return self.criterion.scorer(layer)
        # A seed of its own, or random would pick the same positions in every layer of one width.
        seed = self.seed + crc32(layer.encode())
        return criteria.resolve(self.criterion, distance=self.distance, seed=seed)


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
    all pools involved stay, and if none is known, everything does.
    """
    units = _pool_units(structure, classes)
    if structure.seen.pads and len(units):
        padding = _pool_units(structure, structure.of(torch.cat(structure.seen.pads)))
        both = units[torch.isin(units, padding)]
        units = both if len(both) else units
    return units if len(units) else torch.cat([p.units for p in structure.pools])


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
