"""Replaying a compact model with labels, to see whether the user's code follows the new sizes.

The same rules run again, on the compact model, under a `Checker`. Constants in user code
(`view(-1, 9216)`, `split(x, 64)`) show up here as a mismatch at a known place.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn

from fpgm.planning.dry_run_tracer import Checker, MismatchError
from fpgm.pruning.compaction import rebuild
from fpgm.pruning.plan import Plan
from fpgm.tracing import shape_inference as sketch
from fpgm.tracing.constraints import Place
from fpgm.tracing.grouping import Structure
from fpgm.tracing.tracer import RuleError
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.example_inputs import Example, tensors_in
from fpgm.utils.modules import module_at, walk_once
from fpgm.utils.preserve_state import undisturbed


def needs_replay(structure: Structure, removed: Tensor) -> bool:
    """Whether the user's code may fix a size anywhere, of these channels or of what meets them."""
    return bool(len(removed)) and (
        any(not risk.safe for risk in structure.seen.risks.values())
        or any(not _is_layer(structure, grouping.module) for grouping in structure.seen.groupings)
    )


def replay(
    model: nn.Module,
    structure: Structure,
    plan: Plan,
    removed: Tensor,
    tolerated: Set[tuple[Place, int]] = frozenset(),
) -> tuple[list[Adapter], MismatchError | None]:
    """Run the compact model as the model was watched, or raise `MismatchError`.

    Returns the gathers it needs, and a doubt that only comparing outputs can settle, if any.
    """
    try:
        return _replay(model, structure, plan, removed, tolerated, values=False)
    except (MismatchError, _UserError, sketch.ValuesNeededError) as error:
        # The model may mind zeros instead of sizes: only real values decide.
        if isinstance(error, MismatchError) and not error.of_values:
            raise
        try:
            return _replay(model, structure, plan, removed, tolerated, values=True)
        except _UserError as error:
            raise error.mismatch from error


def _is_layer(structure: Structure, path: str) -> bool:
    """Whether a grouped operator ran in a module of torch's that remembers its groups."""
    kinds = (nn.modules.conv._ConvNd, nn.GroupNorm)
    return isinstance(module_at(structure.seen.model, path), kinds)


class _UserError(Exception):
    """User code raised between operators; carries what to blame if it does so again."""

    def __init__(self, mismatch: MismatchError) -> None:
        super().__init__(mismatch.reason)
        self.mismatch = mismatch


def _replay(
    model: nn.Module,
    structure: Structure,
    plan: Plan,
    removed: Tensor,
    tolerated: Set[tuple[Place, int]],
    values: bool,
) -> tuple[list[Adapter], MismatchError | None]:
    small = rebuild(model, plan, values=values)
    with walk_once(small):
        checker = Checker(small, structure, plan, removed, tolerated, values)
        return _replay_passes(checker)


def _replay_passes(checker: Checker) -> tuple[list[Adapter], MismatchError | None]:
    small, structure = checker.model, checker.structure
    with undisturbed(small), checker.hooked():
        for one in (p for p in structure.seen.passes if not p.repeats_eval):
            small.train(one.training)
            checker.runs = one.number - 1
            torch.manual_seed(0)
            _run(checker, one.example)
    return list(checker.adapters.values()), checker.doubt()


def _run(checker: Checker, example: Example) -> None:
    try:
        checker.check_results([t for t in tensors_in(checker.run(example)) if t.numel()])
    except MismatchError as mismatch:
        mismatch.progress = checker.operators
        raise
    except RuleError:
        raise
    except Exception as error:
        blamed = checker.outside(error)
        blamed.progress = checker.operators
        raise _UserError(blamed) from error
