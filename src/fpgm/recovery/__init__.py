"""Recover accuracy without labels: least squares, batch-norm re-estimation, distillation."""
