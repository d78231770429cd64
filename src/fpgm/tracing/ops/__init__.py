"""Rules: what each ATen operator does to channel labels, one file per kind of operator.

A new rule goes into `RULES` of the file of its kind; `registry` merges them, `base` has the types.
"""
