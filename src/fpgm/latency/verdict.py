"""What the figures mean, in a sentence: does pruning pay here, and if not, why."""

from __future__ import annotations

from collections.abc import Sequence

from fpgm.latency.breakdown import Spent

PAYS = 0.8
"""Below this share of the saving that MACs promise, say why."""
_STEP = 8
"""Channels that vector units take at once."""
_MATTERS = 0.1
"""Share of the time from which on something is worth a word."""


def verdict(faster: float, theory: float, spread: float, layers: Sequence[Spent]) -> str:
    """`2.1× faster; theory 2.2×`, and the reasons if that is far apart.

    >>> verdict(2.1, 2.2, 0.02, [])
    '2.1× faster; theory 2.2×'
    >>> verdict(0.5, 1.0, 0.02, [])
    '2.0× slower; theory 1.0×'
    """
    said = f"{faster:.1f}× faster" if faster >= 1 else f"{1 / faster:.1f}× slower"
    said = f"{said}; theory {theory:.1f}×"
    asked, got = 1 - 1 / theory, 1 - 1 / faster
    if theory <= 1.02 or got >= PAYS * asked:
        return said
    reasons = [*_misaligned(layers), *_elsewhere(layers)]
    if spread > max(0.1, asked):
        reasons.append(f"the machine is busy (times vary by {spread:.0%})")
    why = "; ".join(reasons) or "no single layer explains it: see where the time goes"
    return f"{said}. Less than MACs promise: {why}"


def _misaligned(layers: Sequence[Spent]) -> list[str]:
    """Widths that are no multiple of eight, though the original's were."""
    odd = [
        layer
        for layer in layers
        if len(layer.widths) > 1
        and layer.widths[0] is not None
        and layer.widths[-1] is not None
        and any(
            before % _STEP == 0 and after % _STEP
            for before, after in zip(layer.widths[0], layer.widths[-1], strict=True)
        )
    ]
    whole = sum(layer.seconds[-1] for layer in layers)
    share = sum(layer.seconds[-1] for layer in odd) / whole if whole else 0.0
    if share < _MATTERS:
        return []
    many = f"{len(odd)} layers ({share:.0%} of the time)"
    return [f"{many} have widths that are no multiple of {_STEP}: prune with align={_STEP}"]


def _elsewhere(layers: Sequence[Spent]) -> list[str]:
    """Time in modules without weights to multiply: memory is what they wait for."""
    idle = [layer for layer in layers if layer.widths[0] is None]
    whole = sum(layer.seconds[-1] for layer in layers)
    share = sum(layer.seconds[-1] for layer in idle) / whole if whole else 0.0
    if share < 2 * _MATTERS:
        return []
    kinds: dict[str, float] = {}
    for layer in idle:
        kinds[layer.kind] = kinds.get(layer.kind, 0.0) + layer.seconds[-1]
    names = sorted(kinds, key=lambda kind: -kinds[kind])[:2]
    return [f"{share:.0%} of the time goes into {' and '.join(names)}, which wait for memory"]
