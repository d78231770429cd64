"""Pages, charts and analyses of models and runs."""
