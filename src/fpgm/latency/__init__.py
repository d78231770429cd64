"""Measure latency on this machine, in any runtime, and prune to a latency budget.

- `benchmark`: `bench`, which times models against each other
- `backends`: PyTorch, ONNX Runtime, OpenVINO
- `predictor`: predict a pruned model's latency from the times of its layers
- `lookup_table`: measured times of layers, cached on disk
- `budget_search`: find a plan that meets a latency budget
- `best_alignment`: find the multiple that widths should be rounded to
- `layer_breakdown`: time every layer
- `speedup_summary`: does the speedup match the MACs, and if not, why not
- `memory`: peak memory of a model
"""

from fpgm.latency.benchmark import Bench, bench
from fpgm.latency.budget_search import plan_for_latency
from fpgm.latency.lookup_table import LatencyTable
from fpgm.latency.predictor import Predictor

__all__ = ["Bench", "LatencyTable", "Predictor", "bench", "plan_for_latency"]
