"""Choose rates by measured sensitivity: the knapsack itself is in `planning.allocation`."""

from __future__ import annotations

from fpgm.errors import RequestError
from fpgm.planning.planner import Planner
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.tracing.grouping import Pool


def allocate_by(planner: Planner, sensitivity: Sensitivity) -> None:
    """Let a planner choose rates by a sensitivity, if it was measured for that planner's model."""
    if not sensitivity.complete:
        raise RequestError("The sensitivity was interrupted: measure on with the same file.")
    for key, value in planner.score_key().items():
        if sensitivity.asked.get(key) != value:
            raise RequestError(
                f"The sensitivity was measured for another {key} ({sensitivity.asked.get(key)}, "
                f"not {value}): measure it again."
            )

    def error_of(pool: Pool) -> list[float]:
        # Pools whose first producer is the same layer are told apart by their order.
        same = [p for p in planner.structure.pools if p.name == pool.name]
        which = next(i for i, p in enumerate(same) if p is pool)
        return sensitivity.curve(pool.name, len(pool.units), which)

    planner.error_of = error_of
