"""Dry-run a compact model with labels, to check that the user's code follows the new sizes.

The same rules run again, on the compact model, under a `ValidatingTracer`. Constants in user code
(`view(-1, 9216)`, `split(x, 64)`) show up here as a mismatch at a known operator.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torch import Tensor, nn

from fpgm.planning.dry_run_tracer import MismatchError, ValidatingTracer
from fpgm.pruning.compaction import rebuild
from fpgm.pruning.plan import Plan
from fpgm.tracing import shape_inference
from fpgm.tracing.grouping import Structure
from fpgm.tracing.trace_values import Place
from fpgm.tracing.tracer import RuleError
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.example_inputs import Example, tensors_in
from fpgm.utils.modules import cache_modules, module_at
from fpgm.utils.outputs import read_outputs
from fpgm.utils.preserve_state import preserve_state
from fpgm.utils.rng import seed_torch
from fpgm.utils.thread_lock import with_global_lock


@dataclass(frozen=True)
class DryRun:
    """What a dry run found."""

    adapters: tuple[Adapter, ...]
    """The gathers that the compact model needs."""
    doubt: MismatchError | None
    """A mismatch that only comparing outputs can confirm."""
    runs_as_traced: bool
    """Whether it surely ran the original's operators, with the same numbers."""


def needs_dry_run(structure: Structure, removed: Tensor) -> bool:
    """Tell whether the user's code may fix a size that depends on the removed channels."""
    return bool(len(removed)) and (
        any(not op.safe for op in structure.trace.fixed_size_ops.values())
        or any(not _is_layer(structure, grouping.module) for grouping in structure.trace.groupings)
    )


def dry_run(
    model: nn.Module,
    structure: Structure,
    plan: Plan,
    removed: Tensor,
    tolerated: Set[tuple[Place, int]] = frozenset(),
) -> DryRun:
    """Run the compact model on the traced examples, or raise `MismatchError`."""
    try:
        return _dry_run(model, structure, plan, removed, tolerated, values=False)
    except (MismatchError, _UserCodeError, shape_inference.ValuesNeededError) as error:
        # The zeros may be the cause, not the sizes: only a run with real values can tell.
        if isinstance(error, MismatchError) and not error.of_values:
            raise
        try:
            return _dry_run(model, structure, plan, removed, tolerated, values=True)
        except _UserCodeError as error:
            raise error.mismatch from error


def _is_layer(structure: Structure, path: str) -> bool:
    """Tell whether a grouped operator ran in a torch module that stores its number of groups."""
    kinds = (nn.modules.conv._ConvNd, nn.GroupNorm)
    return isinstance(module_at(structure.trace.model, path), kinds)


class _UserCodeError(Exception):
    """User code raised between operators; carries the mismatch to report if it does so again."""

    def __init__(self, mismatch: MismatchError) -> None:
        super().__init__(mismatch.reason)
        self.mismatch = mismatch


@with_global_lock
def _dry_run(
    model: nn.Module,
    structure: Structure,
    plan: Plan,
    removed: Tensor,
    tolerated: Set[tuple[Place, int]],
    values: bool,
) -> DryRun:
    """Run the compact model once.

    Args:
        model: The original model.
        structure: Its channel groups and trace.
        plan: The plan to check.
        removed: The classes that it removes.
        tolerated: Operators whose sizes may differ from the prediction.
        values: Compute with real values; otherwise heavy operators run on shapes alone.
    """
    small = rebuild(model, plan, values=values)
    with cache_modules(small):
        tracer = ValidatingTracer(small, structure, plan, removed, tolerated, values)
        return _run_passes(tracer)


def _run_passes(tracer: ValidatingTracer) -> DryRun:
    small, structure = tracer.model, tracer.structure
    with preserve_state(small, watched=False), tracer.hooks_installed():
        for one in (p for p in structure.trace.passes if not p.repeats_eval):
            small.train(one.training)
            tracer.runs = one.number - 1
            seed_torch(0)
            _run(tracer, one.example)
    adapters = tuple(tracer.adapters.values())
    return DryRun(adapters, tracer.unresolved_mismatch(), tracer.runs_as_traced())


def _run(tracer: ValidatingTracer, example: Example) -> None:
    try:
        out = tracer.run(example)
        tracer.check_results([t for t in tensors_in(out) if t.numel()])
        tracer.end_log(read_outputs(out))
    except MismatchError as mismatch:
        mismatch.progress = tracer.operator_count
        raise
    except RuleError:
        raise
    except Exception as error:
        user_mismatch = tracer.error_between_operators(error)
        user_mismatch.progress = tracer.operator_count
        raise _UserCodeError(user_mismatch) from error
