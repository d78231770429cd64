"""What a reader wants to know first: how much smaller, how fast, how good, and is it proven."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fpgm.report.run import Run


@dataclass(frozen=True)
class Card:
    """A figure with its name and what it was before."""

    name: str
    value: str
    detail: str
    tone: str = "plain"
    """plain, good or bad."""


def cards(run: Run) -> list[Card]:
    """The figures at the top of the page, as far as there are any."""
    return [*_costs(run), *_time(run), *_accuracy(run), *_certificate(run)]


def _costs(run: Run) -> Iterator[Card]:
    plan = run.plan
    if plan is None or not plan.macs_before:
        return
    yield Card(
        "MACs",
        f"−{plan.macs_removed:.1%}",
        f"{_count(plan.macs_before)} → {_count(plan.macs_after)}",
    )
    yield Card(
        "Parameters",
        f"−{plan.params_removed:.1%}",
        f"{_count(plan.params_before)} → {_count(plan.params_after)}",
    )


def _time(run: Run) -> Iterator[Card]:
    rows = [row for row in (run.bench or {}).get("rows", []) if len(row["figures"]) > 1]
    if rows:
        best = max(rows, key=lambda row: row["figures"][-1]["faster"])
        faster = best["figures"][-1]["faster"]
        yield Card(
            "Latency",
            f"{faster:.2f}× faster" if faster >= 1 else f"{1 / faster:.2f}× slower",
            f"{best['backend']}, batch {best['batch']}, threads {best['threads']}; theory "
            f"{best['theory']:.2f}×",
            "good" if faster > 1 else "bad",
        )
    elif run.plan is not None and run.plan.latency is not None:
        told = run.plan.latency
        yield Card(
            "Latency",
            f"−{told.measured:.1%}",
            f"{1000 * told.seconds_before:.3g} → {1000 * told.seconds_after:.3g} ms in "
            f"{told.backend}; asked {told.asked:.1%}",
        )


def _accuracy(run: Run) -> Iterator[Card]:
    told = run.results.get("accuracy")
    if isinstance(told, dict) and "original" in told:
        last = told.get("recovered", told.get("compact"))
        steps = " → ".join(f"{share:.2%}" for share in told.values())
        yield Card("Accuracy", f"{last:.2%}", f"{steps} ({', '.join(told)})")
    elif isinstance(told, int | float):
        yield Card("Accuracy", f"{told:.2%}", "of the compact model, on test data")
    elif run.metrics and "test_accuracy" in run.metrics[-1]:
        last_epoch = run.metrics[-1]
        yield Card(
            "Accuracy", f"{last_epoch['test_accuracy']:.2%}", f"after epoch {last_epoch['epoch']}"
        )


def _certificate(run: Run) -> Iterator[Card]:
    told: dict[str, Any] | None = run.results.get("certificate")
    if isinstance(told, dict):
        ok = told.get("ok") is True
        yield Card(
            "Certificate",
            "certified" if ok else "NOT certified",
            f"small and silenced original differ by {told['max_error']:.1e}; at most "
            f"{told['tolerance']:.0e} is rounding",
            "good" if ok else "bad",
        )


def _count(number: float) -> str:
    """A count with three digits.

    >>> _count(125_485_706), _count(950)
    ('125 M', '950')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"
