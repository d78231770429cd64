"""Analysis of a model's filters before pruning: norms, redundancy, agreement of criteria.

- `api`: `analyze`
- `result`: the statistics as plain values
- `redundancy`: nearest neighbors, effective rank, projection
- `similar_channels`: feature maps, and kept channels similar to removed ones
"""

from fpgm.report.analysis.api import analyze
from fpgm.report.analysis.result import Analysis, LayerAnalysis

__all__ = ["Analysis", "LayerAnalysis", "analyze"]
