"""Rules: what each ATen operator does to channel labels, one file per kind of operator."""
