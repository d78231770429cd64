"""Latency: measured on this machine, in the runtime that will run the model, and planned for."""
