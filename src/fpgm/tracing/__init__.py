"""Trace a model once, follow every channel, and group channels that are removed together."""
