"""Reproduction of the FPGM paper: its FLOPs counts, the compared methods, and its tables.

- `flops`: the paper's FLOPs columns, recomputed
- `baselines`: the compared methods
- `tables`: the tables and figures
"""
