"""The cards at the top of a report: MACs, parameters, latency, accuracy and certificate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fpgm.report.records import BenchRowRecord
from fpgm.report.run import Run
from fpgm.utils.text import format_number
from fpgm.utils.timing import describe_speedup


@dataclass(frozen=True)
class Card:
    """One metric: its name, its value, and a line with the details."""

    name: str
    value: str
    detail: str
    tone: str = "plain"
    """CSS class of the card: plain, good or bad."""


def cards(run: Run) -> list[Card]:
    """List the cards that the run has data for."""
    return [
        *_weights_card(run), *_cost_cards(run), *_latency_card(run), *_accuracy_card(run),
        *_certificate_card(run),
    ]  # fmt: skip


def final_accuracy(run: Run) -> float | None:
    """Return the accuracy of the model that the run saved, or None if it was not measured."""
    accuracy = run.results.accuracy
    if isinstance(accuracy, dict):
        return accuracy.get("recovered", accuracy.get("compact"))
    return accuracy


def _weights_card(run: Run) -> Iterator[Card]:
    if run.results.untrained:
        detail = "random weights: the outputs mean nothing, pruned or not; --weights gives others"
        yield Card("Weights", "UNTRAINED", detail, "bad")


def _cost_cards(run: Run) -> Iterator[Card]:
    plan = run.plan
    if plan is None or not plan.macs_before:
        return
    yield Card(
        "MACs",
        _format_reduction(plan.macs_removed),
        f"{_format_count(plan.macs_before)} → {_format_count(plan.macs_after)} multiply-adds",
    )
    yield Card(
        "Parameters",
        _format_reduction(plan.params_removed),
        f"{_format_count(plan.params_before)} → {_format_count(plan.params_after)}",
    )


def _latency_card(run: Run) -> Iterator[Card]:
    rows = [
        (faster, row)
        for row in (run.bench.rows if run.bench else ())
        if len(row.figures) > 1 and (faster := row.figures[-1].faster or 0) > 0
    ]
    if rows:
        reliable = [pair for pair in rows if not pair[1].crowd]
        yield _speedup_card(reliable) if reliable else _unreliable_card(rows[0][1])
    elif run.plan is not None and run.plan.latency is not None:
        latency = run.plan.latency
        if latency.crowd:
            yield Card("Latency", "unknown", f"UNRELIABLE: {latency.crowd}")
            return
        yield Card(
            "Latency",
            _format_reduction(latency.measured),
            f"{format_number(1000 * latency.seconds_before)} → "
            f"{format_number(1000 * latency.seconds_after)} ms "
            f"in {latency.backend}; requested {_format_reduction(latency.asked)}",
            "plain" if latency.measured >= 0 else "bad",
        )


def _speedup_card(rows: Sequence[tuple[float, BenchRowRecord]]) -> Card:
    """Show the best of these reliable measurements, in the words of `fpgm bench`."""
    faster, best = max(rows, key=lambda pair: pair[0])
    value = describe_speedup(faster, max(f.spread or 0 for f in best.figures))
    times = [best.figures[0].seconds, best.figures[-1].seconds]
    change = " → ".join(format_number(1000 * t) for t in times if t is not None)
    measured = f"{change} ms, " if None not in times else ""
    context = "" if len(rows) == 1 else f"the best of {len(rows)} measurements: "
    theory = best.theoretical_speedup
    expected = "" if theory is None else f"; by MACs: {theory:.2f}×"
    same = value == "as fast"
    return Card(
        "Latency",
        value,
        f"{'as' if same else 'than'} {best.figures[0].model}; {context}{measured}{best.backend}, "
        f"batch {best.batch}, threads {best.threads}{expected}",
        "plain" if same else "good" if faster > 1 else "bad",
    )


def _unreliable_card(row: BenchRowRecord) -> Card:
    detail = f"UNRELIABLE: {row.crowd}; measure again on an idle machine with fpgm bench --keep"
    return Card("Latency", "unknown", detail)


def _accuracy_card(run: Run) -> Iterator[Card]:
    accuracy, final = run.results.accuracy, final_accuracy(run)
    count = run.results.test_images
    test_set = "test data" if count is None else f"{count:.0f} test images"
    if isinstance(accuracy, dict):
        known = {name: value for name, value in accuracy.items() if value is not None}
        steps = ", ".join(f"{name} {value:.2%}" for name, value in known.items())
        if known:
            headline = "unknown" if final is None else f"{final:.2%}"
            yield Card("Accuracy", headline, f"{steps}; {test_set}")
    elif accuracy is not None:
        kind = "trained" if run.plan is None else "compact"
        yield Card("Accuracy", f"{accuracy:.2%}", f"of the {kind} model, on {test_set}")
    elif run.metrics and run.metrics[-1].test_accuracy is not None:
        newest = run.metrics[-1]
        yield Card("Accuracy", f"{newest.test_accuracy:.2%}", f"after epoch {newest.epoch}")


def _certificate_card(run: Run) -> Iterator[Card]:
    certificate = run.results.certificate
    if certificate is not None:
        context = "before recovery: " if run.results.recovery is not None else ""
        error, tolerance = certificate.max_error, certificate.tolerance
        difference = "" if error is None else f"; largest difference {error:.1e}"
        limit = "" if tolerance is None else f", tolerance {tolerance:.0e}"
        yield Card(
            "Certificate",
            "certified" if certificate.ok else "NOT certified",
            f"{context}compact model compared with the masked original{difference}{limit}",
            "good" if certificate.ok else "bad",
        )
    elif run.plan is not None and run.results.max_error is not None:
        # Training raises an error and writes no results if the check fails.
        yield Card(
            "Certificate",
            "certified",
            "compact model compared with the masked trained model; largest difference "
            f"{run.results.max_error:.1e}",
            "good",
        )


def _format_reduction(fraction: float) -> str:
    """Format a removed fraction as a signed change.

    >>> _format_reduction(0.5), _format_reduction(-0.034), _format_reduction(0.0)
    ('−50.0%', '+3.4%', '0.0%')
    """
    text = f"{abs(fraction):.1%}"
    return text if text == "0.0%" else ("−" if fraction > 0 else "+") + text


def _format_count(number: float) -> str:
    """Format a count with three digits and a unit prefix.

    >>> _format_count(125_485_706), _format_count(999_950), _format_count(950)
    ('125 M', '1.00 M', '950')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + f" {letter}"
    return f"{number:.0f}"
