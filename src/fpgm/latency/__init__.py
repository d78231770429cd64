"""Measure latency on this machine, in any runtime, and prune to a latency budget."""
