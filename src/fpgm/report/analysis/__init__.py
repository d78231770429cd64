"""What the weights of a model say about pruning it."""
