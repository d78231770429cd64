"""What the figures mean, in a sentence: does pruning pay here, and if not, why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fpgm.latency.backends import Piece
from fpgm.latency.layer_breakdown import Spent
from fpgm.planning.budget import ALIGN

PAYS = 0.8
"""Below this share of the saving that MACs promise, say why."""
_MATTERS = 0.1
"""Share of the time from which on something is worth a word."""
_BUSY = 0.1
"""Spread beyond which times say more about the machine than about the model."""
_APART = 1.25
"""How many times as long one median is as another where no one would call both as fast."""
_MULTIPLY = ("conv", "gemm", "matmul", "fullyconnected", "reorder")
"""In names of the nodes in which runtimes multiply, or prepare for it."""

Reasons = Callable[[], list[str]]


def verdict(
    faster: float, theory: float, spread: float, reasons: Reasons, doubt: str | None = None
) -> str:
    """`2.1× faster; theory 2.2×`, and the reasons if that is far apart.

    Where there is a reason to `doubt` the measurement, that is said in place of what it found.

    >>> verdict(2.1, 2.2, 0.02, list)
    '2.1× faster; theory 2.2×'
    >>> verdict(0.5, 1.0, 0.02, list)
    '2.0× slower; theory 1.0×'
    >>> verdict(0.99, 1.0, 0.02, list)
    'as fast; theory 1.0×'
    """
    promised = f"theory {theory:.1f}×"
    if doubt is not None:
        return f"not to be relied on: {doubt}; measure again on an idle machine; {promised}"
    said = f"{_compared(faster, spread)}; {promised}"
    asked, got = 1 - 1 / theory, 1 - 1 / faster
    if theory <= 1.02 or got >= PAYS * asked:
        return said
    found = reasons()
    if spread > _BUSY:
        found.append(f"the machine is busy (times vary by {spread:.0%})")
    why = "; ".join(found) or "it is spread over many layers: see where the time goes"
    return f"{said}. Less than MACs promise: {why}"


def contradiction(faster: float, medians: float) -> str | None:
    """What is wrong where turns do not find the faster model that medians of all times find.

    Turns are what is believed, as long as both point the same way.

    >>> contradiction(1.0, 7.87 / 27.7)
    'turn by turn it is 1.0× as fast, by the medians 0.3×'
    >>> contradiction(1.8, 1.5), contradiction(1.0, 1.1)
    (None, None)
    """
    against = faster < 1 + _BUSY if medians > _APART else faster > 1 - _BUSY
    if not against or 1 / _APART <= medians <= _APART:
        return None
    return f"turn by turn it is {faster:.1f}× as fast, by the medians {medians:.1f}×"


def _compared(faster: float, spread: float) -> str:
    times = max(faster, 1 / faster)
    if f"{times:.1f}" == "1.0" or abs(1 - 1 / faster) <= min(spread, _BUSY):
        return "as fast"
    return f"{times:.1f}× {'faster' if faster > 1 else 'slower'}"


def reasons(
    layers: Sequence[Spent], place: int, pieces: Callable[[], list[Piece]] | None
) -> Reasons:
    """Why the model at a place may be slow: its widths, and where the runtime spends its time."""

    def found() -> list[str]:
        if pieces is not None:
            spent = {(p.name, p.kind): (p.seconds, _multiplies(p.kind)) for p in pieces()}
        else:
            sure = [s for s in layers if not s.bounds(place)]
            spent = {(s.path, s.kind): (s.seconds[place], s.multiplies) for s in sure}
        return [*_misaligned(layers, place), *_elsewhere(spent)]

    return found


def _multiplies(kind: str) -> bool:
    return any(word in kind.lower() for word in _MULTIPLY)


def _misaligned(layers: Sequence[Spent], place: int) -> list[str]:
    """Widths that are no multiple of that, though the original's were and could have stayed so."""
    odd = [layer for layer in layers if _odd(layer.widths[0], layer.widths[place])]
    whole = sum(layer.seconds[place] for layer in layers)
    share = sum(layer.seconds[place] for layer in odd) / whole if whole else 0.0
    if share < _MATTERS:
        return []
    many = "1 layer" if len(odd) == 1 else f"{len(odd)} layers"
    have = "has" if len(odd) == 1 else "have"
    many = f"{many} ({share:.0%} of the time in PyTorch)"
    return [f"{many} {have} widths that are no multiple of {ALIGN}, as the original's were"]


def _odd(before: tuple[int, int] | None, after: tuple[int, int] | None) -> bool:
    """By the rule of plans for time: multiples are asked for from twice that width on."""
    return (
        before is not None
        and after is not None
        and any(
            old % ALIGN == 0 and old >= 2 * ALIGN and new % ALIGN != 0
            for old, new in zip(before, after, strict=True)
        )
    )


def _elsewhere(spent: dict[tuple[str, str], tuple[float, bool]]) -> list[str]:
    """Time in what has no weights to multiply with: memory is what it waits for."""
    whole = sum(seconds for seconds, _ in spent.values())
    kinds: dict[str, float] = {}
    for (_, kind), (seconds, multiplies) in spent.items():
        if not multiplies:
            kinds[kind] = kinds.get(kind, 0.0) + seconds
    share = sum(kinds.values()) / whole if whole else 0.0
    if share < 2 * _MATTERS:
        return []
    names = sorted(kinds, key=lambda kind: -kinds[kind])[:2]
    return [f"{share:.0%} of the time goes into {' and '.join(names)}, which wait for memory"]
