"""Measure how much pruning each group tolerates: the output error that is left after recovery."""
