"""The callback that reports progress."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the current item, how many are done, and the total; 0 of 0 if unknown."""
