"""Let a planner choose rates by measured sensitivity; the solver is `planning.knapsack`."""

from __future__ import annotations

from fpgm.errors import RequestError
from fpgm.planning.planner import Planner
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.tracing.grouping import ChannelGroup


def allocate_by(planner: Planner, sensitivity: Sensitivity) -> None:
    """Let a planner choose rates by a sensitivity that was measured for the same model."""
    if not sensitivity.complete:
        raise RequestError(
            "The sensitivity is incomplete: call fpgm.sensitivity again with the same cache file."
        )
    for key, value in planner.score_key().items():
        if sensitivity.asked.get(key) != value:
            raise RequestError(
                f"The sensitivity was measured for another {key} ({sensitivity.asked.get(key)}, "
                f"not {value}): call fpgm.sensitivity again."
            )

    def error_of(group: ChannelGroup) -> list[float]:
        # Groups with the same first producer have the same name: their order tells which is which.
        same = [p for p in planner.structure.groups if p.name == group.name]
        which = next(i for i, p in enumerate(same) if p is group)
        return sensitivity.curve(group.name, len(group.units), which)

    planner.error_of = error_of
