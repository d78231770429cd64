"""High-level workflow: plan, prune, recover, evaluate and save."""
