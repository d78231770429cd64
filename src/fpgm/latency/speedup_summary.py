"""Summarize a speedup in a sentence: does it match the MACs, and if not, why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fpgm.latency.backends import ProfiledNode
from fpgm.latency.layer_breakdown import LayerTime
from fpgm.planning.width_rounding import ALIGN
from fpgm.utils.timing import NOISE, describe_speedup

MIN_ACHIEVED = 0.8
"""With less than this fraction of the theoretical saving, reasons are given."""
_MIN_FRACTION = 0.1
"""Of the time, for something to be mentioned."""
_CLEAR_RATIO = 1.25
"""Ratio from which two medians clearly differ."""
_MATMUL_WORDS = ("conv", "gemm", "matmul", "fullyconnected", "reorder")
"""In names of nodes that multiply matrices, or prepare for it."""

Reasons = Callable[[], list[str]]


def summarize(
    faster: float, theory: float, spread: float, reasons: Reasons, doubt: str | None = None
) -> str:
    """Compare a speedup with the theoretical one, with reasons if it is much smaller.

    >>> summarize(2.1, 2.2, 0.02, list)
    '2.1× faster; theory 2.2×'
    >>> summarize(0.5, 1.0, 0.02, list)
    '2.0× slower; theory 1.0×'
    >>> summarize(0.99, 1.0, 0.02, list)
    'as fast; theory 1.0×'

    Args:
        faster: the measured speedup.
        theory: the speedup by MACs.
        spread: of the times, relative to their median.
        reasons: called to find reasons.
        doubt: why the measurement is unreliable, if it is; then no speedup is given.
    """
    theoretical = f"theory {theory:.1f}×"
    if doubt is not None:
        return f"unreliable: {doubt}; measure again on an idle machine; {theoretical}"
    text = f"{describe_speedup(faster, spread)}; {theoretical}"
    expected, achieved = 1 - 1 / theory, 1 - 1 / faster
    if theory <= 1.02 or achieved >= MIN_ACHIEVED * expected:
        return text
    causes = reasons()
    if spread > NOISE:
        causes.append(f"the machine is busy (times vary by {spread:.0%})")
    why = "; ".join(causes) or "the loss is spread over many layers: see where the time goes"
    return f"{text}. Less than the MACs suggest: {why}"


def find_contradiction(faster: float, medians: float) -> str | None:
    """Describe the contradiction if paired runs and medians of all runs clearly disagree.

    Paired runs are more reliable, as long as both find the same model faster.

    >>> find_contradiction(1.0, 7.87 / 27.7)
    'paired runs say 1.0× as fast, medians say 0.3×'
    >>> find_contradiction(1.8, 1.5), find_contradiction(1.0, 1.1)
    (None, None)

    Args:
        faster: speedup by paired runs.
        medians: speedup by the medians of all times.
    """
    disagree = faster < 1 + NOISE if medians > _CLEAR_RATIO else faster > 1 - NOISE
    if not disagree or 1 / _CLEAR_RATIO <= medians <= _CLEAR_RATIO:
        return None
    return f"paired runs say {faster:.1f}× as fast, medians say {medians:.1f}×"


def slowdown_reasons(
    layers: Sequence[LayerTime], model: int, profile: Callable[[], list[ProfiledNode]] | None
) -> Reasons:
    """Return a function that finds why a model is slow: its widths, and memory-bound operators.

    Args:
        layers: times of all models' layers in PyTorch.
        model: index of the model.
        profile: of the model in the runtime, if that has a profiler.
    """

    def find() -> list[str]:
        if profile is not None:
            times = {(n.name, n.kind): (n.seconds, _is_matmul(n.kind)) for n in profile()}
        else:
            exact = [layer for layer in layers if not layer.is_bound(model)]
            times = {(t.path, t.kind): (t.seconds[model], t.multiplies) for t in exact}
        return [*_misaligned_widths(layers, model), *_memory_bound(times)]

    return find


def _is_matmul(kind: str) -> bool:
    return any(word in kind.lower() for word in _MATMUL_WORDS)


def _misaligned_widths(layers: Sequence[LayerTime], model: int) -> list[str]:
    """Report layers whose widths are no longer aligned, if they take much of the time."""
    misaligned = [
        layer for layer in layers if _lost_alignment(layer.widths[0], layer.widths[model])
    ]
    total = sum(layer.seconds[model] for layer in layers)
    fraction = sum(layer.seconds[model] for layer in misaligned) / total if total else 0.0
    if fraction < _MIN_FRACTION:
        return []
    which = "1 layer has" if len(misaligned) == 1 else f"{len(misaligned)} layers have"
    part = f"({fraction:.0%} of the time in PyTorch)"
    return [f"{which} widths that are not multiples of {ALIGN}, unlike the original's {part}"]


def _lost_alignment(before: tuple[int, int] | None, after: tuple[int, int] | None) -> bool:
    """Tell whether aligned widths became odd ones; widths below twice the multiple do not count."""
    return (
        before is not None
        and after is not None
        and any(
            old % ALIGN == 0 and old >= 2 * ALIGN and new % ALIGN != 0
            for old, new in zip(before, after, strict=True)
        )
    )


def _memory_bound(times: dict[tuple[str, str], tuple[float, bool]]) -> list[str]:
    """Report operators without a weight matrix, if they take much of the time."""
    total = sum(seconds for seconds, _ in times.values())
    kinds: dict[str, float] = {}
    for (_, kind), (seconds, multiplies) in times.items():
        if not multiplies:
            kinds[kind] = kinds.get(kind, 0.0) + seconds
    fraction = sum(kinds.values()) / total if total else 0.0
    if fraction < 2 * _MIN_FRACTION:
        return []
    names = sorted(kinds, key=lambda kind: -kinds[kind])[:2]
    return [f"{fraction:.0%} of the time goes into {' and '.join(names)}, which are memory-bound"]
