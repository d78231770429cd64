"""Algorithm 1: train, and at the end of every epoch zero the most replaceable filters.

`SoftPruner` does the second part in any training loop. In `soft` mode, as in the paper, zeroed
units are trained further and may regrow; in `hard` mode they are held at zero.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from fpgm.errors import FpgmError, ModelError, RequestError
from fpgm.planning.budget import Budget
from fpgm.planning.options import PlanKeywords, PlanOptions
from fpgm.planning.planner import BuiltPlan, Planner
from fpgm.pruning.compaction import check_fits, compact
from fpgm.pruning.masking import MASKED_ROLES, PRODUCER_ROLES, SliceMasker, mask_
from fpgm.pruning.optimizer_state import check_optimizer, inner_optimizer, move_optimizer_
from fpgm.pruning.plan import Group, Plan
from fpgm.pruning.plan_text import safe_text
from fpgm.pruning.verification import Certificate, verify
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.html_table import html_table
from fpgm.utils.keywords import check_keywords
from fpgm.utils.modules import named_tensors, unwrap_model
from fpgm.workflow.api import check_prunes
from fpgm.workflow.prune_schedule import PruneSchedule

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack

Mode = Literal["soft", "hard"]


@dataclass(frozen=True)
class Step:
    """The outcome of one pruning step."""

    epoch: int
    share: float | None
    """Fraction of the full amount requested; None if the schedule skips the epoch."""
    units: int = 0
    zeroed: int = 0
    regrown: int = 0
    """Of the units zeroed last time, those whose filters are no longer zero."""
    returned: int = 0
    """Of the units zeroed last time, those that are no longer zeroed."""
    changed: int = 0
    """Units added to or removed from the zeroed ones."""

    def __str__(self) -> str:
        if self.share is None:
            return f"epoch {self.epoch}: not pruned"
        return (
            f"epoch {self.epoch}: {self.zeroed} of {self.units} units zeroed ({self.changed} "
            f"added or removed), {self.regrown} had regrown, {self.returned} released"
        )


class SoftPruner:
    """Prunes a model while it is trained.

        pruner = fpgm.SoftPruner(model, example_inputs, rate=0.4, optimizer=optimizer)
        for epoch in range(epochs):
            train_one_epoch(model)
            pruner.step()
        small = pruner.compact()

    Args:
        model: The model; wrappers such as `DistributedDataParallel` are allowed.
        example_inputs: As for `fpgm.plan`.
        rate: Fraction of units to remove from every group.
        macs: Fraction of MACs to remove, instead of `rate`.
        params: Fraction of parameters to remove, instead of `rate`.
        rates: Rates by layer pattern, which override the options above.
        interval: Prune every `interval` epochs.
        start: First epoch of the schedule, counted from 1.
        end: Last epoch of the schedule; None: no end.
        ramp: Epochs over which the amount rises to its final value.
        hold: Units that are zero at the end of this epoch stay zero.
        mode: `"soft"`: zeroed units may regrow; `"hard"`: they stay zero.
        optimizer: The optimizer of the model. In soft mode the momentum of zeroed units is zeroed,
            which would otherwise bring them back. Required by `mode="hard"` and `hold`, which undo
            its steps on zeroed units.
        options: Other options of `fpgm.plan`: `criterion`, `residual`, `align`, …
    """

    @cpu_by_default()
    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        *,
        rate: float | None = None,
        macs: float | None = None,
        params: float | None = None,
        rates: Mapping[str, float] | None = None,
        interval: int = 1,
        start: int = 1,
        end: int | None = None,
        ramp: int = 0,
        hold: int | None = None,
        mode: Mode = "soft",
        optimizer: torch.optim.Optimizer | None = None,
        **options: Unpack[PlanKeywords],
    ) -> None:
        check_keywords("SoftPruner", options, _OPTIONS)
        if mode not in ("soft", "hard"):
            raise RequestError(f"mode is {mode!r}: give 'soft' or 'hard'.")
        self.schedule = PruneSchedule(interval, start, end, ramp, 1 if mode == "hard" else hold)
        holding = "mode='hard'" if mode == "hard" else f"hold={hold}"
        if self.schedule.hold is not None and optimizer is None:
            raise RequestError(f"{holding} undoes steps of the optimizer: pass optimizer=.")
        if (macs is not None or params is not None) and self.schedule.rises_while_holding():
            raise RequestError(
                f"{holding} with a ramp needs rate=: on the way to a target in MACs or "
                "parameters, units held at zero would have to be released."
            )
        budget = Budget(rate, macs, params, dict(rates or {}))
        self.model = unwrap_model(model)
        self.mode = mode
        self.optimizer = None if optimizer is None else inner_optimizer(optimizer)
        self.example_inputs = example_inputs
        choice = PlanOptions(**options)
        self.planner = Planner(self.model, example_inputs, budget=budget, options=choice)
        self.epoch = 0
        self.plan: Plan | None = None
        """The plan whose units were zeroed last."""
        self.certificate: Certificate | None = None
        """The result of verifying the compact model."""
        self._removed = torch.zeros(0, dtype=torch.int64)
        self._holding = False
        """Whether the zeroed units are held at zero."""
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove_hooks, self._hooks)
        if self.schedule.hold is not None and self.optimizer is not None:
            self._check_trains(self.optimizer, holding)

    def __repr__(self) -> str:
        return f"SoftPruner({self._describe_outcome()})"

    def _repr_html_(self) -> str:
        rows = [(safe_text(g.name), str(g.units), str(g.units - g.kept)) for g in self._groups()]
        header = ("group", "units", "zeroed") if rows else ()
        return html_table(f"SoftPruner: {self._describe_outcome()}", header, rows)

    def _describe_outcome(self) -> str:
        """Describe the state of pruning in one line."""
        start = f"{self.mode}, epoch {self.epoch}"
        if self.plan is None:
            return f"{start}: nothing zeroed yet"
        units = sum(group.units for group in self._groups())
        kept = sum(group.kept for group in self._groups())
        held = ", held at zero" if self._holding else ""
        verdict = "" if self.certificate is None else "; compacted and verified"
        return (
            f"{start}: {units - kept} of {units} units zeroed{held}, MACs would fall by "
            f"{self.plan.macs_removed:.1%}{verdict}"
        )

    def _groups(self) -> tuple[Group, ...]:
        return () if self.plan is None else self.plan.groups

    @cpu_by_default()
    def step(self) -> Step:
        """Select channels by the current weights and zero them; call it after every epoch."""
        epoch = self.epoch + 1
        share = self.schedule.fraction(epoch)
        step = Step(epoch, None) if share is None else self._prune(share, epoch)
        if self.schedule.holds(epoch) and self.plan is not None and not self._holding:
            self._holding = True
            self._zero(self.plan)
        self.epoch = epoch
        return step

    @cpu_by_default()
    def compact(self, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """Select a last time, at the full amount, and return the verified compact model.

        The model itself is left masked: it computes exactly what the compact one does. If
        `optimizer` is given, it is moved to the compact model with its state.
        """
        if optimizer is not None:
            check_optimizer(optimizer, self.model)
        self._prune(1.0, self.epoch)
        assert self.plan is not None
        check_prunes(self.plan)
        mask_(self.model, self.plan)
        small = compact(self.model, self.plan)
        certificate = verify(self.model, self.plan, self.example_inputs, compacted=small)
        self.certificate = certificate.check()
        _remove_hooks(self._hooks)
        if optimizer is not None:
            move_optimizer_(optimizer, self.model, small, self.plan)
        return small

    @cpu_by_default()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of pruning as plain values."""
        plan = None if self.plan is None else self.plan.to_json()
        return {
            "epoch": self.epoch,
            "mode": self.mode,
            "plan": plan,
            "gone": self._removed.tolist(),
            "holding": self._holding,
            "frozen": self.planner.learned_constraints,
        }

    @cpu_by_default()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; if it does not fit, nothing is changed."""
        if state["mode"] != self.mode:
            raise RequestError(
                f"The saved state has mode={state['mode']!r}, but this pruner has "
                f"mode={self.mode!r}: create it with the same mode."
            )
        plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        if plan is not None:
            check_fits(self.model, plan)
        epoch, removed = int(state["epoch"]), torch.tensor(state["gone"], dtype=torch.int64)
        holding = bool(state["holding"])
        if holding and self.optimizer is None:
            raise RequestError("The saved state holds units at zero: pass optimizer=.")
        self.planner.add_constraints(state["frozen"])
        self.epoch, self.plan, self._removed, self._holding = epoch, plan, removed, holding
        self._hold(plan)

    def _prune(self, share: float, epoch: int) -> Step:
        before = self._removed
        regrown = self._count_regrown()
        choice = self._choose_together(share)
        self.plan, self._removed = choice.plan, choice.removed
        self._holding |= self.schedule.holds(epoch)
        self._zero(choice.plan)
        left = int((~torch.isin(before, self._removed)).sum())
        entered = int((~torch.isin(self._removed, before)).sum())
        units = sum(group.units for group in choice.plan.groups)
        zeroed = len(self._removed)
        return Step(epoch, share, units, zeroed, regrown, left, changed=left + entered)

    def _choose_together(self, share: float) -> BuiltPlan:
        """Return the plan that all processes follow: the first one's."""
        first = self._removed if self._holding and len(self._removed) else None
        if not (dist.is_available() and dist.is_initialized()):
            return self.planner.build_plan(share, first, certified=self.plan is None)
        sent: list[Any] = [None, None, None]
        if dist.get_rank() == 0:
            try:
                choice = self.planner.build_plan(share, first, certified=self.plan is None)
                sent = [None, choice.plan.to_json(), choice.removed.tolist()]
            except FpgmError as error:  # the other processes are waiting for the result
                sent[0] = str(error)
        dist.broadcast_object_list(sent)
        problem, text, removed = sent
        if problem is not None:
            raise ModelError(problem)
        return BuiltPlan(Plan.from_json(text), torch.tensor(removed, dtype=torch.int64))

    def _count_regrown(self) -> int:
        """Count the units zeroed last time whose filters are no longer zero."""
        if not len(self._removed):
            return 0
        structure, grown = self.planner.structure, torch.zeros(0, dtype=torch.int64)
        tensors = named_tensors(self.model)
        for producer in structure.producers:
            if producer.info.name in tensors:
                alive = producer.filters(tensors[producer.info.name]).detach().any(1).cpu()
                grown = torch.cat([grown, producer.classes[alive]])
        return int(torch.isin(self._removed, grown).sum())

    def _zero(self, plan: Plan) -> None:
        """Zero the plan's units and their momentum, and hold them at zero if required."""
        masker = SliceMasker(self.model, plan, MASKED_ROLES if self._holding else PRODUCER_ROLES)
        masker.weights_()
        if self.optimizer is not None:
            masker.momentum_(self.optimizer)
        self._hold(plan)

    def _hold(self, plan: Plan | None) -> None:
        """Release the units held so far, and hold the plan's units at zero if required."""
        _remove_hooks(self._hooks)
        if self._holding and plan is not None and self.optimizer is not None:
            self._hooks += SliceMasker(self.model, plan, MASKED_ROLES).hold(self.optimizer)

    def _check_trains(self, optimizer: torch.optim.Optimizer, holding: str) -> None:
        """Refuse an optimizer that does not train the model."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in held and p.requires_grad for p in self.model.parameters()):
            raise RequestError(
                f"{holding} undoes steps of the optimizer, but this one holds no parameter of the "
                "model: pass the optimizer that trains it."
            )


_OPTIONS = (*signature(SoftPruner).parameters, *PlanKeywords.__annotations__)
"""All keyword options of a pruner."""


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove hooks, now or when the pruner is deleted."""
    while hooks:
        hooks.pop().remove()
