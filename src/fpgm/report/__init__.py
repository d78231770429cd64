"""HTML reports about runs, charts, and the analysis of a model's weights."""
