"""Apply a plan: mask, compact, verify, save and load.

- `plan`, `plan_json`, `plan_text`: the plan as a value, as JSON, as text and HTML
- `plan_checks`: a plan from a file is checked against the model
- `compaction`, `slicing`: build the compact model
- `adapter_placement`: add the plan's gathers and scatters to it
- `masking`: zero units in place, in the full-size model
- `verification`: compare the compact model with the masked original
- `masked_reference`, `verification_weights`, `decision_inputs`, `float64`, `output_differences`,
  `train_check`: parts of the verification
- `serialization`: save and load weights with plans
- `optimizer_state`: slice an optimizer's state like the weights
"""

from fpgm.pruning.compaction import compact
from fpgm.pruning.masking import mask_
from fpgm.pruning.optimizer_state import move_optimizer_
from fpgm.pruning.plan import Plan
from fpgm.pruning.serialization import load, save
from fpgm.pruning.verification import Certificate, verify

__all__ = ["Certificate", "Plan", "compact", "load", "mask_", "move_optimizer_", "save", "verify"]
