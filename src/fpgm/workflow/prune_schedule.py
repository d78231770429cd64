"""When to prune during training, and how much of the final amount. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from fpgm.errors import RequestError


@dataclass(frozen=True)
class PruneSchedule:
    """Every `interval` epochs from `start` to `end`, rising over the first `ramp` of them.

    Units that are zero at the end of epoch `hold` stay zero. Epochs are counted from 1, and pruning
    happens at the end of an epoch.

    >>> [PruneSchedule(interval=2, ramp=4).fraction(epoch) for epoch in range(1, 7)]
    [None, 0.5, None, 1.0, None, 1.0]
    """

    interval: int = 1
    start: int = 1
    end: int | None = None
    ramp: int = 0
    hold: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("interval", 1), ("start", 1), ("ramp", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise RequestError(f"{name} is {value!r}: give an integer of at least {least}.")
        if self.end is not None and (not isinstance(self.end, int) or self.end < self.start):
            raise RequestError(
                f"end is {self.end!r}: give an integer of at least start ({self.start}), or None."
            )
        if self.hold is not None and (not isinstance(self.hold, int) or self.hold < 1):
            raise RequestError(f"hold is {self.hold!r}: give an integer of at least 1, or None.")

    def fraction(self, epoch: int) -> float | None:
        """Return the fraction of the full amount to prune after an epoch; None: do not prune."""
        passed = epoch - self.start + 1
        if passed < 1 or (self.end is not None and epoch > self.end):
            return None
        if passed % self.interval:
            return None
        return min(1.0, passed / self.ramp) if self.ramp else 1.0

    def holds(self, epoch: int) -> bool:
        """Tell whether units that are zero at the end of this epoch stay zero."""
        return self.hold is not None and epoch >= self.hold

    def rises_while_holding(self) -> bool:
        """Tell whether the amount still grows while zeroed units are held."""
        rising = range(self.start, self.start + self.ramp)
        shares = [self.fraction(epoch) for epoch in rising if self.holds(epoch)]
        return any(share is not None and share < 1 for share in shares)
