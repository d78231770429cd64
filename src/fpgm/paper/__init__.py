"""Reproduction of the FPGM paper: its FLOPs counts, the compared methods, and its tables."""
