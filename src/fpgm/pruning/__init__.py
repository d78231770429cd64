"""Apply a plan: mask, compact, verify, save and load."""
