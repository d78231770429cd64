"""Decide which channels to remove: budgets, scores, selection, and a dry run."""
