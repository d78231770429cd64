"""Measure how much pruning each group tolerates: the output error that is left after recovery.

- `api`: `sensitivity`
- `result`: the measured errors, for every group and rate
- `probes`: statistics of all layers, collected in one run over the data
- `error_curves`: estimated output error of removing 1, 2, … units
- `trials`: the same, measured on a pruned model
- `runner`: all groups, with a cache file
- `apply_to_planner`: rates chosen by sensitivity; `planning.knapsack` solves for them
"""

from fpgm.recovery.sensitivity.api import sensitivity
from fpgm.recovery.sensitivity.result import GroupSensitivity, Sensitivity

__all__ = ["GroupSensitivity", "Sensitivity", "sensitivity"]
