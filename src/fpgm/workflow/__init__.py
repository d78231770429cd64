"""High-level workflow: plan, prune, recover, evaluate and save.

- `api`: `plan` and `prune`
- `plan_request`: all options of `plan` as one value
soft_pruner, prune_schedule Algorithm 1 during training, and when to prune
- `pipeline`: prune, recover, evaluate and save, as `fpgm prune` does
- `pruned_folder`: read and write the folder of a pruned model
- `original_model`: build the original model of a run
- `step_timer`: the steps of a job, with their durations
"""

from fpgm.workflow.api import PruneResult, plan, prune
from fpgm.workflow.pipeline import run_pruning, run_recovery, save_pruning, save_recovery
from fpgm.workflow.soft_pruner import SoftPruner

__all__ = [
    "PruneResult",
    "SoftPruner",
    "plan",
    "prune",
    "run_pruning",
    "run_recovery",
    "save_pruning",
    "save_recovery",
]
