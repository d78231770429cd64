"""`plan` and `prune`: from a model to a plan, and to a verified compact model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from fpgm.errors import ModelError, RequestError
from fpgm.latency.best_alignment import best_step
from fpgm.latency.budget_search import BackendConfig, plan_for_latency
from fpgm.latency.lookup_table import LatencyTable
from fpgm.planning.options import Criterion
from fpgm.planning.planner import Planner, check_model
from fpgm.planning.width_rounding import ALIGN, Rounding
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.verification import Certificate, certify
from fpgm.recovery.sensitivity.apply_to_planner import allocate_by
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.recovery.sensitivity.runner import measure_sensitivity
from fpgm.tracing.layer_calls import called_layers
from fpgm.tracing.residual import Residual
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.denormals import count_denormals
from fpgm.utils.example_inputs import as_examples, to_model_device
from fpgm.utils.keywords import reject_unknown_keywords, with_options_of
from fpgm.utils.modules import with_cached_modules
from fpgm.utils.progress import Progress
from fpgm.utils.thread_lock import pause_garbage_collection
from fpgm.workflow.plan_request import Allocate, PlanRequest


@reject_unknown_keywords
@cpu_by_default()
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

    Give one of `rate`, `macs`, `params` and `latency`, or `rates`, or one of them with `rates`.

    Args:
        model: The network to prune.
        example_inputs: A tensor, a tuple of arguments, a dict of keyword arguments, or a list of
            several of these.
        rate: Fraction of the units to remove from every group.
        macs: Fraction of the model's multiply-accumulates to remove.
        params: Fraction of the model's parameters to remove.
        latency: Fraction of the time of one inference to remove, measured on this machine with
            the first example, in `backend`.
        rates: Rates of single layers, by pattern: `{"layer3.*": 0.2}`.
        criterion: How filters are scored: a name in `fpgm.criteria`, or a function [n, d] → n
            scores. The lowest scores are removed first.
        distance: Distance between filters: "l2", "l1" or "cosine"; for the criteria fpgm and mix.
        residual: "coupled" prunes layers that add into one residual stream together;
            "independent" prunes each separately, as in the paper.
        ignore: Patterns of layers that keep their widths.
        align: Multiple that widths are rounded to, smaller in narrow layers; 1 turns rounding off,
            "auto" measures which multiple is fastest in `backend`.
        rounding: "nearest" rounds to the nearest multiple; "paper" removes int(n · rate) units.
        min_channels: Smallest number of channels that a layer keeps.
        approximate: Also prune channels that a norm averages over, which changes its statistics.
        keep_outputs: If False, the model's own outputs may lose channels too.
        seed: Seed of the criterion "random".
        allocate: "uniform" gives every group the same rate; "sensitivity" gives each the rate at
            which the output error is smallest for the same cost, measured on `loader`; or the
            result of `fpgm.sensitivity`.
        loader: Batches of inputs, for `allocate="sensitivity"`.
        backend: Runtime in which time is measured: eager, channels-last, compile, onnxruntime,
            openvino, cuda or cuda-compile.
        threads: Number of threads of that runtime; by default PyTorch's.
        progress: Called with the current layer, the number done, and the total.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> print(plan(net, torch.zeros(1, 3, 8, 8), rate=0.5, align=1).groups[0].kept)
    4
    """
    request = PlanRequest(
        rate=rate, macs=macs, params=params, latency=latency, rates=rates, criterion=criterion,
        distance=distance, residual=residual, ignore=ignore, align=align, rounding=rounding,
        min_channels=min_channels, approximate=approximate, keep_outputs=keep_outputs, seed=seed,
        allocate=allocate, loader=loader, backend=backend, threads=threads, progress=progress,
    )  # fmt: skip
    # One pause for all of it: each time it ends, everything that was made is looked through.
    with nullcontext() if request.measures else pause_garbage_collection():
        return make_plan(model, example_inputs, request)[0]


@with_options_of(plan)
@cpu_by_default()
def prune(model: nn.Module, example_inputs: Any, **options: Any) -> nn.Module:
    """Plan, compact and verify in one call; takes the options of `plan`.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> prune(net, torch.zeros(1, 3, 8, 8), rate=0.5, align=1)[0].out_channels
    4
    """
    request = PlanRequest(**options)
    result, planner = make_plan(model, example_inputs, request)
    return compact_certified(planner, result, request).model


@with_cached_modules
def make_plan(
    model: nn.Module, /, example_inputs: Any, request: PlanRequest
) -> tuple[Plan, Planner]:
    """Return a plan and the planner that made it, which knows the traced model."""
    notes: list[str] = []
    if request.align == "auto":
        measured = measure_alignment(model, example_inputs, request.where)
        request = replace(request, align=measured or ALIGN)
        how = "as measured" if measured else "the default: no layer is wide enough to measure"
        notes.append(f"Widths of wide layers are rounded to multiples of {request.align}, {how}.")
    planner = Planner(model, example_inputs, budget=request.budget, options=request)
    _allocate(planner, request)
    result = _choose_plan(planner, request)
    if count := count_denormals(model):
        notes.append(
            f"{count} weights are denormal (too small for full precision); compact zeroes them."
        )
    return (replace(result, notes=(*result.notes, *notes)) if notes else result), planner


def _allocate(planner: Planner, request: PlanRequest) -> None:
    """Let a planner choose rates by sensitivity, if that is requested."""
    allocate = request.allocate
    if isinstance(allocate, Sensitivity):
        allocate_by(planner, allocate)
    elif allocate == "sensitivity":
        if request.loader is None:
            raise RequestError("allocate='sensitivity' needs data: pass loader=.")
        allocate_by(
            planner, measure_sensitivity(planner, request.loader, progress=request.progress)
        )
    elif allocate != "uniform":
        raise RequestError(f"allocate is {allocate!r}: give 'uniform', 'sensitivity' or a result.")


def measure_alignment(model: nn.Module, example_inputs: Any, where: BackendConfig) -> int | None:
    """Find the multiple of widths that is fastest by timing the model's layers.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> where = BackendConfig.of("eager", 1)
    >>> print(measure_alignment(net, torch.zeros(1, 3, 8, 8), where))  # too narrow
    None
    """
    model = check_model(model)
    called = called_layers(model, as_examples(to_model_device(model, example_inputs))[0])
    return best_step(called, LatencyTable(where.backend, where.threads))


@dataclass(frozen=True)
class PruneResult:
    """A compact model, its plan and its certificate."""

    model: nn.Module
    plan: Plan
    certificate: Certificate


def compact_certified(planner: Planner, plan: Plan, request: PlanRequest) -> PruneResult:
    """Compact and verify; if outputs differ, freeze the responsible groups and plan again."""
    first = _compact_and_certify(planner, plan)
    if not first.certificate.differs:
        return _check_certificate(first)
    planner.certifies = True
    again = _choose_plan(planner, request)
    notes = tuple(note for note in plan.notes if note not in again.notes)
    return _check_certificate(
        _compact_and_certify(planner, replace(again, notes=(*again.notes, *notes)))
    )


def _compact_and_certify(planner: Planner, plan: Plan) -> PruneResult:
    check_prunes(plan)
    small = compact(planner.model, plan)
    return PruneResult(small, plan, certify(planner.model, plan, planner.examples, small))


def _check_certificate(pruned: PruneResult) -> PruneResult:
    pruned.certificate.check()
    return pruned


def _choose_plan(planner: Planner, request: PlanRequest) -> Plan:
    if planner.budget.latency is not None:
        return plan_for_latency(planner, request.where, request.progress)
    return planner.build_plan().plan


def check_prunes(plan: Plan) -> None:
    """Refuse a plan that removes nothing."""
    if not plan.cuts and plan.groups and all(group.units == 1 for group in plan.groups):
        raise ModelError(
            "There is nothing to prune: in every group, all channels can only be removed together."
        )
    if not plan.cuts:
        raise RequestError("This would remove no unit: request more, or use align=1.")
