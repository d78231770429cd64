"""What became of one network under one setting, for `fpgm` and, beside it, for Torch-Pruning.

A verdict is one word. `exact`: the compact model equals the reference. `frozen in part`: the same,
and some channels were left alone with a reason. `refused`: one clear error, no model.
`silent`: a wrong model was handed over. `crash`: any other error. `untrainable`: the original
trains and the compact model does not.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.helpers.independent_reference import Comparison, compare, run_leaves, training_fault
from tests.helpers.output_comparison import difference
from torch import nn

import fpgm

from .registry import Network

SETTINGS: dict[str, dict[str, Any]] = {
    "rate 0.3": {"rate": 0.3},
    "rate 0.5": {"rate": 0.5, "align": 1},
    "macs 0.3": {"macs": 0.3, "align": 1},
    "independent": {"rate": 0.5, "align": 1, "residual": "independent"},
}
FAULTS = ("silent", "crash", "untrainable")
BROKEN = "the original no longer runs"


@dataclass
class Verdict:
    """One word, the reason for it, and how long planning and compacting took."""

    word: str
    reason: str = ""
    removed: int = 0
    frozen: list[str] = field(default_factory=list)
    error: float = 0.0
    moved: float = 0.0
    precision: str = ""
    first_lock: str = ""
    """What `plan` and `compact` give without verification: right, wrong, refused or crash."""
    seconds: float | None = None


def judge(network: Network, options: dict[str, Any]) -> Verdict:
    """Prune a network with `fpgm.prune` and say what came of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judge(network, options)


def _judge(network: Network, options: dict[str, Any]) -> Verdict:
    model, example = network.build(), network.examples()
    try:
        small = fpgm.prune(model, example, **options)
    except fpgm.PlanError as error:  # it calls its own plan damaged
        return Verdict("crash", describe(error))
    except fpgm.FpgmError as error:
        return Verdict("refused", one_line(error))
    except Exception as error:
        return Verdict("crash", describe(error))
    plan = small.fpgm_plans[-1]
    reasons = sorted({f.reason for f in plan.frozen if not f.reason.startswith("the model's out")})
    verdict = Verdict(
        "frozen in part" if reasons else "exact",
        frozen=reasons,
        removed=sum(g.units - g.kept for g in plan.groups),
    )
    changed = _trace_left(network, model)
    result = _compare(network.build, small, plan, network.new_inputs())
    if isinstance(result, str) or not result.ok:
        verdict.word, verdict.reason = "silent", result if isinstance(result, str) else str(result)
    elif changed:
        verdict.word, verdict.reason = "silent", changed
    elif fault := _training_lost(network, plan):
        verdict.word, verdict.reason = "untrainable", fault
    if verdict.reason.startswith(BROKEN):
        verdict.word = "crash"
    if not isinstance(result, str):
        verdict.error, verdict.moved = result.error, result.moved
        verdict.precision = result.precision
    return verdict


def first_lock(network: Network, options: dict[str, Any]) -> tuple[str, float | None]:
    """Plan and compact without verifying: what that gives, and the processor time it took."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, example = network.build(), network.examples()
        start = time.process_time()
        try:
            plan = fpgm.plan(model, example, **options)
            small = fpgm.compact(model, plan)
        except fpgm.FpgmError:
            return "refused", None
        except Exception as error:
            return f"crash: {describe(error)}", None
        seconds = time.process_time() - start
        result = _compare(network.build, small, plan, network.new_inputs())
    if isinstance(result, str):
        return f"wrong: {result}", seconds
    return ("right" if result.ok else f"wrong: {result}"), seconds


def _compare(
    build: Callable[[], nn.Module], small: nn.Module, plan: Any, inputs: list[Any]
) -> Comparison | str:
    """Compare with the reference; a compact model that does not run is described instead."""
    try:
        for example in inputs:
            run_leaves(build(), example, False)
    except Exception as error:
        return f"{BROKEN}: {describe(error)}"
    try:
        return compare(build, small, plan, inputs)
    except Exception as error:
        return describe(error)


def _trace_left(network: Network, used: nn.Module) -> str:
    """Say whether pruning a model left something behind in it."""
    example = network.new_inputs()[0]
    try:
        before = run_leaves(network.build(), example, False)
        after = run_leaves(used, example, False)
    except Exception as error:
        return f"{BROKEN}: {describe(error)}"
    if difference(before, after, torch.float32)[0] > 1e-5:
        return "the original computes something else after being pruned"
    return ""


def _training_lost(network: Network, plan: Any) -> str | None:
    if training_fault(network.build(), network.example()) is not None:
        return None
    return training_fault(fpgm.compact(network.build(), plan), network.example())


def one_line(error: BaseException) -> str:
    """An error's text on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def describe(error: BaseException) -> str:
    """An error's text and the last place it passed."""
    places = traceback.extract_tb(error.__traceback__)
    place = f" ({places[-1].filename.rpartition('/')[2]}:{places[-1].lineno})" if places else ""
    return one_line(error) + place
