"""Recover accuracy without labels: least squares, batch-norm re-estimation, distillation.

- `api`: `recover` with all steps, and the choice of the best model
- `least_squares`, `layer_solver`: solve for the weights of one layer
- `solvable_layers`, `unfold`: which layers can be solved, and as which matrices
- `staged_forward`, `activation_offload`: forward passes that pause at each layer
- `solve_cache`: continue an interrupted recovery
- `bn_reestimation`: batch-norm statistics over new data
- `distillation`, `feature_matching`: train the compact model towards the original's outputs
- `data_free`, `rectified_gaussian`: recovery without data
- `candidates`: compare candidates for the result
- `sensitivity`: how much pruning each group tolerates
"""

from fpgm.recovery.api import Recovery, recover
from fpgm.recovery.bn_reestimation import reestimate_batch_norms_

__all__ = ["Recovery", "recover", "reestimate_batch_norms_"]
