"""`plan` and `prune`: the whole way from a model to a decision, and on to a certified result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from fpgm.errors import RequestError
from fpgm.latency.best_alignment import best_step
from fpgm.latency.budget_search import Where, plan_for_latency
from fpgm.latency.lookup_table import Table
from fpgm.planning.budget import ALIGN, Budget, Rounding
from fpgm.planning.planner import Criterion, Planner, check_model
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.verification import Certificate, certify
from fpgm.recovery.sensitivity.allocation import allocate_by
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.recovery.sensitivity.runner import measure_sensitivity
from fpgm.tracing.layer_calls import called_layers
from fpgm.tracing.residual import Residual
from fpgm.utils.denormals import count_denormals
from fpgm.utils.example_inputs import as_examples, beside
from fpgm.utils.modules import walks_once
from fpgm.utils.progress import Progress

Allocate = Literal["uniform", "sensitivity"] | Sensitivity


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    rate: float | None = None,
    macs: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    rates: Mapping[str, float] | None = None,
    criterion: Criterion = "fpgm",
    distance: str = "l2",
    residual: Residual = "coupled",
    ignore: Sequence[str] = (),
    align: int | Literal["auto"] = ALIGN,
    rounding: Rounding = "nearest",
    min_channels: int = 1,
    approximate: bool = False,
    keep_outputs: bool = True,
    seed: int = 0,
    allocate: Allocate = "uniform",
    loader: Iterable[Any] | None = None,
    backend: str = "eager",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide which units to remove; nothing happens to the model.

    How much goes: `rate` (share of every group's units), or `macs`, `params` or `latency` (share
    of the model's multiply-accumulates, parameters, or time), with `rates` by layer pattern beside
    it. Time is measured on this machine with the first example, in a `backend` (eager,
    channels-last, compile, onnxruntime, openvino, cuda, cuda-compile) with so many `threads`.
    Which: `criterion` (a name in `fpgm.criteria`, or a function [n, d] → n scores, low goes first),
    `distance` for FPGM, `seed` for random.
    Where: `ignore` keeps the widths of layers by pattern; `residual` says whether layers that add
    into one stream shrink together (`coupled`) or each on its own (`independent`, the paper's);
    `approximate` allows norms over fewer channels; `keep_outputs=False` lets outputs shrink.
    `allocate="sensitivity"` gives every group the rate at which all together do the least harm
    for the same cost, measured on batches of a `loader`; or give a measured `Sensitivity`.
    How widths are rounded: to multiples of `align` (smaller in narrow layers; "auto" measures
    which is best in the `backend`); `rounding="paper"` removes int(n · rate); `min_channels` always
    stay.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> print(plan(net, torch.zeros(1, 3, 8, 8), rate=0.5, align=1).groups[0].kept)
    4
    """
    made, _ = planned(
        model, example_inputs,
        rate=rate, macs=macs, params=params, latency=latency, rates=rates, criterion=criterion,
        distance=distance, residual=residual, ignore=ignore, align=align, rounding=rounding,
        min_channels=min_channels, approximate=approximate, keep_outputs=keep_outputs, seed=seed,
        allocate=allocate, loader=loader, backend=backend, threads=threads, progress=progress,
    )  # fmt: skip
    return made


@walks_once
def planned(
    model: nn.Module,
    /,
    example_inputs: Any,
    *,
    rate: float | None = None,
    macs: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    rates: Mapping[str, float] | None = None,
    align: int | Literal["auto"] = ALIGN,
    allocate: Allocate = "uniform",
    loader: Iterable[Any] | None = None,
    backend: str = "eager",
    threads: int | None = None,
    progress: Progress | None = None,
    **choices: Any,
) -> tuple[Plan, Planner]:
    """A plan, and the planner that drew it: what it knows of the model need not be found again."""
    notes: list[str] = []
    if align == "auto":
        found = measured_align(model, example_inputs, Where.of(backend, threads))
        align = found or ALIGN
        how = "as measured" if found else "for no layer is wide enough to measure which is best"
        notes.append(f"Widths are multiples of {align} where layers are wide enough, {how}.")
    planner = Planner(
        model,
        example_inputs,
        budget=Budget(rate, macs, params, dict(rates or {}), latency),
        align=align,
        **choices,
    )
    if isinstance(allocate, Sensitivity):
        allocate_by(planner, allocate)
    elif allocate == "sensitivity":
        if loader is None:
            raise RequestError("allocate='sensitivity' is measured on data: give loader=.")
        allocate_by(planner, measure_sensitivity(planner, loader, progress=progress))
    elif allocate != "uniform":
        raise RequestError(f"allocate is {allocate!r}: give 'uniform', 'sensitivity' or a result.")
    made = _decide(planner, Where.of(backend, threads), progress)
    if count := count_denormals(model):
        notes.append(
            f"{count} weights are too small to be normal numbers; compact sets them to zero."
        )
    return (replace(made, notes=(*made.notes, *notes)) if notes else made), planner


def measured_align(model: nn.Module, example_inputs: Any, where: Where) -> int | None:
    """The multiple of which widths should be for speed there, found by timing the model's layers.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> print(measured_align(net, torch.zeros(1, 3, 8, 8), Where.of("eager", 1)))  # too narrow
    None
    """
    model = check_model(model)
    called = called_layers(model, as_examples(beside(model, example_inputs))[0])
    return best_step(called, Table(where.backend, where.threads))


@dataclass(frozen=True)
class Pruned:
    """A compact model, the plan that made it and the certificate that it is right."""

    model: nn.Module
    plan: Plan
    certificate: Certificate


def prune(model: nn.Module, example_inputs: Any, **options: Any) -> nn.Module:
    """Plan, compact and verify in one call; takes the options of `plan`."""
    made, planner = planned(model, example_inputs, **options)
    where = Where.of(options.get("backend", "eager"), options.get("threads"))
    return compact_certified(planner, made, where, options.get("progress")).model


def compact_certified(
    planner: Planner, made: Plan, where: Where, progress: Progress | None = None
) -> Pruned:
    """Compact and verify; where outputs differ, freeze the groups to blame and plan again."""
    found = _compact_and_certify(planner, made)
    if not found.certificate.differs:
        return _checked(found)
    planner.certifies = True
    again = _decide(planner, where, progress)
    notes = tuple(note for note in made.notes if note not in again.notes)
    return _checked(_compact_and_certify(planner, replace(again, notes=(*again.notes, *notes))))


def _compact_and_certify(planner: Planner, made: Plan) -> Pruned:
    check_prunes(made)
    small = compact(planner.model, made)
    return Pruned(small, made, certify(planner.model, made, planner.examples, small))


def _checked(found: Pruned) -> Pruned:
    found.certificate.check()
    return found


def _decide(planner: Planner, where: Where, progress: Progress | None) -> Plan:
    if planner.budget.latency is not None:
        return plan_for_latency(planner, where, progress)
    return planner.draw().plan


def check_prunes(made: Plan) -> None:
    """Refuse a plan that removes nothing."""
    if not made.cuts:
        raise RequestError("No unit would go: ask for more, or for finer steps with align=1.")
