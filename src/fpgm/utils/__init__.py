"""Shared helpers: modules and tensors by name, safe files, text, progress, random numbers."""
