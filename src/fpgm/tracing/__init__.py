"""Run a model once, follow every channel, and group the channels that can only go together."""
