"""The pruning methods that FPGM is compared with, one file each.

- `registry`: all methods by name
- `base`: the interface: `Task` in, `MethodResult` out
- `comparison`: several methods on one model, at one budget
- `one_shot`: criteria of this package: FPGM, FPGM-mix, l2, random
- `cp`, `group_norm`, `hrank`, `mil`, `nisp`, `pfec`, `rethinking`, `slimming`, `soft`, `taylor`,
  `thinet`: one method each
- `bn_scales`, `global_threshold`, `unit_contributions`, `hooks`, `short_training`: shared by
  several methods
"""

from fpgm.paper.baselines.base import Method, MethodResult, SgdSchedule, Task
from fpgm.paper.baselines.registry import METHODS, get_method

__all__ = ["METHODS", "Method", "MethodResult", "SgdSchedule", "Task", "get_method"]
