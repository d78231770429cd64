"""What the figures mean, in a sentence: does pruning pay here, and if not, why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fpgm.budget import ALIGN
from fpgm.latency.backends import Piece
from fpgm.latency.breakdown import Spent

PAYS = 0.8
"""Below this share of the saving that MACs promise, say why."""
_MATTERS = 0.1
"""Share of the time from which on something is worth a word."""
_BUSY = 0.1
"""Spread beyond which times say more about the machine than about the model."""
_MULTIPLY = ("conv", "gemm", "matmul", "fullyconnected", "reorder")
"""In names of the nodes in which runtimes multiply, or prepare for it."""

Reasons = Callable[[], list[str]]


def verdict(
    faster: float, theory: float, spread: float, reasons: Reasons, crowd: str | None = None
) -> str:
    """`2.1× faster; theory 2.2×`, and the reasons if that is far apart.

    Where others took part in the measurement (`crowd`), that is the reason, whatever it was.

    >>> verdict(2.1, 2.2, 0.02, list)
    '2.1× faster; theory 2.2×'
    >>> verdict(0.5, 1.0, 0.02, list)
    '2.0× slower; theory 1.0×'
    >>> verdict(0.99, 1.0, 0.02, list)
    'as fast; theory 1.0×'
    """
    said = f"{_compared(faster, spread)}; theory {theory:.1f}×"
    if crowd is not None:
        return f"{said}. Not to be relied on: {crowd}, so measure again when they are idle"
    asked, got = 1 - 1 / theory, 1 - 1 / faster
    if theory <= 1.02 or got >= PAYS * asked:
        return said
    found = reasons()
    if spread > _BUSY:
        found.append(f"the machine is busy (times vary by {spread:.0%})")
    why = "; ".join(found) or "it is spread over many layers: see where the time goes"
    return f"{said}. Less than MACs promise: {why}"


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
            spent = {(s.path, s.kind): (s.seconds[place], s.multiplies) for s in layers}
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
