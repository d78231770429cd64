"""Callbacks that run Algorithm 1 in other training frameworks, one module per framework."""
