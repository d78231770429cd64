"""Bring accuracy back without labels: least squares, batch-norm re-estimation, distillation."""
