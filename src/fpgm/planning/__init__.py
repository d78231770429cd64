"""Decide which channels to remove: budgets, scores, selection, and a dry run.

- `planner`: trace once, then build plans while the weights change
- `options`, `budget`: what the user requests, as values
- `width_rounding`: how many units of a group stay at a given rate
- `unit_scores`, `precomputed_scores`: scores of a group's units
- `selection`, `equal_split`: units to remove for a budget; blocks that shrink equally
- `knapsack`: a rate for every group, from sensitivities
- `plan_builder`: from selected units to a plan
- `size_attributes`, `remembered_sizes`: numbers in modules that change with their channels
- `dry_run`, `dry_run_tracer`, `adapter_checks`: check that the user's code accepts the new sizes
- `failing_groups`: groups that make a compact model differ from the original
- `narrow_groups`: groups too narrow to prune without care
"""

from fpgm.planning.budget import Budget
from fpgm.planning.options import PlanOptions
from fpgm.planning.planner import BuiltPlan, Planner

__all__ = ["Budget", "BuiltPlan", "PlanOptions", "Planner"]
