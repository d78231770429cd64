"""The top of a report: a run in one sentence, and cards with the details."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fpgm.report.run import Run
from fpgm.report.speed import best_speed, runtime_name, speeds
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


def summary(run: Run) -> str:
    """Describe a run in one sentence, with nothing that is unknown or unreliable.

    "Half of the work removed, 0.4 points lost, 1.9× faster in ONNX Runtime; verified."
    """
    if run.plan is None:
        return ""
    parts = [_format_work(run.plan.macs_removed)] if run.plan.macs_before else []
    before, after = original_accuracy(run), final_accuracy(run)
    if before is not None and after is not None and not run.results.untrained:
        parts.append(_format_points(after - before))
    if speedup := _reliable_speedup(run):
        parts.append(speedup)
    verdict = {True: "verified", False: "NOT verified", None: ""}[_is_verified(run)]
    ends = [verdict, "random weights" if run.results.untrained else ""]
    text = "; ".join(filter(None, [", ".join(parts), *ends]))
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def cards(run: Run) -> list[Card]:
    """List the cards that the run has data for."""
    return [*_cost_cards(run), *_latency_card(run), *_accuracy_card(run), *_certificate_card(run)]


def final_accuracy(run: Run) -> float | None:
    """Return the accuracy of the model that the run saved, or None if it was not measured."""
    accuracy = run.results.accuracy
    if isinstance(accuracy, dict):
        return accuracy.get("recovered", accuracy.get("compact"))
    return accuracy


def original_accuracy(run: Run) -> float | None:
    """Return the accuracy of the original, or None if it was not measured."""
    accuracy = run.results.accuracy
    return accuracy.get("original") if isinstance(accuracy, dict) else None


def _reliable_speedup(run: Run) -> str:
    """Describe the best reliable speedup of `fpgm bench`, else that of a latency budget."""
    measured = speeds(run)
    best = best_speed(measured)
    if best is not None:
        return f"{best.change} in {best.runtime}"
    latency = None if run.plan is None else run.plan.latency
    if measured or latency is None or latency.crowd or latency.measured >= 1:
        return ""
    return f"{describe_speedup(1 / (1 - latency.measured))} in {runtime_name(latency.backend)}"


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
    measured = speeds(run)
    best = best_speed(measured)
    if best is not None:
        count = sum(not speed.doubt for speed in measured)
        context = "" if count == 1 else f"the best of {count} measurements: "
        word = "as" if best.change == "as fast" else "than"
        expected = "" if best.theory is None else f"; by MACs: {describe_speedup(best.theory)}"
        yield Card(
            "Latency",
            best.change,
            f"{word} {best.original}; {context}{best.setting}{expected}",
            "plain" if word == "as" else "good" if best.faster > 1 else "bad",
        )
    elif measured:
        yield Card(
            "Latency", "unreliable", f"{measured[0].doubt}; measure again on an idle machine"
        )
    elif run.plan is not None and run.plan.latency is not None:
        latency = run.plan.latency
        if doubt := latency.crowd:
            yield Card("Latency", "unreliable", f"{doubt}; measure again on an idle machine")
            return
        yield Card(
            "Latency",
            _format_reduction(latency.measured),
            f"{format_number(1000 * latency.seconds_before)} → "
            f"{format_number(1000 * latency.seconds_after)} ms "
            f"in {runtime_name(latency.backend)}; requested {_format_reduction(latency.asked)}",
            "plain" if latency.measured >= 0 else "bad",
        )


_STEPS = {"compact": "as pruned", "before": "before this recovery", "recovered": "recovered"}
"""Names of accuracies in results.json, in words."""


def _accuracy_card(run: Run) -> Iterator[Card]:
    accuracy, final = run.results.accuracy, final_accuracy(run)
    count = run.results.test_images
    test_set = "test data" if count is None else f"{count:,.0f} test images"
    if isinstance(accuracy, dict):
        before = original_accuracy(run)
        steps = [
            f"{_STEPS.get(name, name)} {value:.2%}"
            for name, value in accuracy.items()
            if value is not None and value not in (before, final)
        ]
        if before is not None and final is not None:
            change = _format_points(final - before)
            details = [change, *steps, test_set]
            yield Card("Accuracy", f"{before:.1%} → {final:.1%}", "; ".join(details))
        elif any(value is not None for value in accuracy.values()):
            known = [] if before is None else [f"original {before:.2%}"]
            value = "unknown" if final is None else f"{final:.2%}"
            yield Card("Accuracy", value, "; ".join([*known, *steps, test_set]))
    elif accuracy is not None:
        kind = "trained" if run.plan is None else "compact"
        yield Card("Accuracy", f"{accuracy:.2%}", f"of the {kind} model, on {test_set}")
    elif run.metrics and run.metrics[-1].test_accuracy is not None:
        newest = run.metrics[-1]
        yield Card("Accuracy", f"{newest.test_accuracy:.2%}", f"after epoch {newest.epoch}")


def _is_verified(run: Run) -> bool | None:
    """Return whether the compact model matched the masked one, or None if that is unknown."""
    if run.results.certificate is not None:
        return run.results.certificate.ok
    # Training raises an error and writes no results if the check fails.
    return True if run.plan is not None and run.results.max_error is not None else None


def _certificate_card(run: Run) -> Iterator[Card]:
    certificate = run.results.certificate
    if certificate is not None:
        context = "before recovery: " if run.results.recovery is not None else ""
        error, tolerance = certificate.max_error, certificate.tolerance
        difference = "" if error is None else f"; largest difference {error:.1e}"
        limit = "" if tolerance is None else f", tolerance {tolerance:.0e}"
        yield Card(
            "Verification",
            "verified" if certificate.ok else "NOT verified",
            f"{context}compact model compared with the masked original{difference}{limit}",
            "good" if certificate.ok else "bad",
        )
    elif _is_verified(run):
        yield Card(
            "Verification",
            "verified",
            "compact model compared with the masked trained model; largest difference "
            f"{run.results.max_error:.1e}",
            "good",
        )


def _format_work(removed: float) -> str:
    """Describe the fraction of MACs removed.

    >>> _format_work(0.501), _format_work(0.616), _format_work(0.0), _format_work(-0.03)
    ('half of the work removed', '62% of the work removed', 'no work removed', '3% of work added')
    """
    if abs(removed) < 0.005:
        return "no work removed"
    if removed < 0:
        return f"{-removed:.0%} of work added"
    fraction = "half" if 0.49 <= removed <= 0.51 else f"{removed:.0%}"
    return f"{fraction} of the work removed"


def _format_points(change: float) -> str:
    """Describe a change of accuracy in percentage points.

    >>> _format_points(-0.004), _format_points(0.0123), _format_points(-0.0004)
    ('0.4 points lost', '1.2 points gained', 'no accuracy lost')
    """
    points = f"{abs(100 * change):.1f}"
    if points == "0.0":
        return "no accuracy lost"
    return f"{points} points {'lost' if change < 0 else 'gained'}"


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
