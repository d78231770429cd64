"""What long work tells whoever shows it."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Told what is being worked on, how much is done, and of how much; 0 of 0 where nobody knows."""
