"""The paper: its FLOPs, the methods it compares, and its tables."""
