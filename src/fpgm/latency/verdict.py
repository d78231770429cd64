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
_MULTIPLY = ("conv", "gemm", "matmul", "fullyconnected", "reorder")
"""In names of the nodes in which runtimes multiply, or prepare for it."""

Reasons = Callable[[], list[str]]


def verdict(faster: float, theory: float, spread: float, reasons: Reasons) -> str:
    """`2.1× faster; theory 2.2×`, and the reasons if that is far apart.

    >>> verdict(2.1, 2.2, 0.02, list)
    '2.1× faster; theory 2.2×'
    >>> verdict(0.5, 1.0, 0.02, list)
    '2.0× slower; theory 1.0×'
    """
    said = f"{faster:.1f}× faster" if faster >= 1 else f"{1 / faster:.1f}× slower"
    said = f"{said}; theory {theory:.1f}×"
    asked, got = 1 - 1 / theory, 1 - 1 / faster
    if theory <= 1.02 or got >= PAYS * asked:
        return said
    found = reasons()
    if spread > max(0.1, asked):
        found.append(f"the machine is busy (times vary by {spread:.0%})")
    why = "; ".join(found) or "it is spread over many layers: see where the time goes"
    return f"{said}. Less than MACs promise: {why}"


def reasons(layers: Sequence[Spent], pieces: Callable[[], list[Piece]] | None) -> Reasons:
    """Why a model may be slow: its widths, and where the runtime itself spends its time."""

    def found() -> list[str]:
        if pieces is not None:
            spent = {(p.name, p.kind): (p.seconds, _multiplies(p.kind)) for p in pieces()}
        else:
            spent = {(s.path, s.kind): (s.seconds[-1], s.multiplies) for s in layers}
        return [*_misaligned(layers), *_elsewhere(spent)]

    return found


def _multiplies(kind: str) -> bool:
    return any(word in kind.lower() for word in _MULTIPLY)


def _misaligned(layers: Sequence[Spent]) -> list[str]:
    """Widths that are no multiple of that, though the original's were and could have stayed so."""
    odd = [
        layer
        for layer in layers
        if len(layer.widths) > 1
        and layer.widths[0] is not None
        and layer.widths[-1] is not None
        and any(
            before % ALIGN == 0 and before >= 8 * ALIGN and after % ALIGN
            for before, after in zip(layer.widths[0], layer.widths[-1], strict=True)
        )
    ]
    whole = sum(layer.seconds[-1] for layer in layers)
    share = sum(layer.seconds[-1] for layer in odd) / whole if whole else 0.0
    if share < _MATTERS:
        return []
    many = f"{len(odd)} wide layers ({share:.0%} of the time in PyTorch)"
    return [f"{many} have widths that are no multiple of {ALIGN}, as the original's were"]


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
