"""Analysis of a model's filters before pruning: norms, redundancy, agreement of criteria."""
