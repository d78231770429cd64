"""Decide which channels go: budgets, scores, selection, and a dry run of the smaller model."""
