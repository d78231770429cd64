"""Which of several processes this is, as their launcher says, and whether it has met the others."""

from __future__ import annotations

import os

_met = False


def is_first() -> bool:
    """Whether this process speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def count() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def meet() -> None:
    """Remember that this process has joined others: that shows to its end."""
    global _met
    _met = True


def met() -> bool:
    """Whether it ever has, though it may have left them since."""
    return _met
