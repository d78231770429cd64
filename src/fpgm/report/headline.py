"""What a reader wants to know first: how much smaller, how fast, how good, and is it proven."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fpgm.report.run import Run
from fpgm.utils.text import figure


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


def last_accuracy(run: Run) -> float | None:
    """Of the model that was written, as far as that was counted."""
    told = run.results.accuracy
    if isinstance(told, dict):
        return told.get("recovered", told.get("compact"))
    return told


def _costs(run: Run) -> Iterator[Card]:
    plan = run.plan
    if plan is None or not plan.macs_before:
        return
    yield Card(
        "MACs",
        _less(plan.macs_removed),
        f"{_count(plan.macs_before)} → {_count(plan.macs_after)} multiply-adds",
    )
    yield Card(
        "Parameters",
        _less(plan.params_removed),
        f"{_count(plan.params_before)} → {_count(plan.params_after)}",
    )


def _time(run: Run) -> Iterator[Card]:
    rows = [
        (row.figures[-1].faster, row)
        for row in (run.bench.rows if run.bench else ())
        if len(row.figures) > 1 and (row.figures[-1].faster or 0) > 0
    ]
    rows = [own for own in rows if not own[1].crowd] or rows
    if rows:
        faster, best = max(rows, key=lambda own: own[0] or 0)
        assert faster is not None
        of = "" if len(rows) == 1 else f"the best of {len(rows)} measurements: "
        theory = "" if best.promised is None else f"; MACs promise {best.promised:.2f}×"
        doubt = f". NOT to be relied on: {best.crowd}" if best.crowd else ""
        word = "as" if _pace(faster) == "as fast" else "than"
        sure = word == "than" and not doubt
        yield Card(
            "Latency",
            _pace(faster),
            f"{word} {best.figures[0].model}; {of}{best.backend}, batch {best.batch}, threads "
            f"{best.threads}{theory}{doubt}",
            "plain" if not sure else "good" if faster > 1 else "bad",
        )
    elif run.plan is not None and run.plan.latency is not None:
        told = run.plan.latency
        yield Card(
            "Latency",
            _less(told.measured),
            f"{figure(1000 * told.seconds_before)} → {figure(1000 * told.seconds_after)} ms in "
            f"{told.backend}; asked {_less(told.asked)}",
            "plain" if told.measured >= 0 else "bad",
        )


def _pace(faster: float) -> str:
    """How many times as fast.

    >>> _pace(1.5), _pace(0.5), _pace(0.998)
    ('1.50× faster', '2.00× slower', 'as fast')
    """
    times = f"{max(faster, 1 / faster):.2f}"
    return "as fast" if times == "1.00" else f"{times}× {'faster' if faster > 1 else 'slower'}"


def _accuracy(run: Run) -> Iterator[Card]:
    told, last = run.results.accuracy, last_accuracy(run)
    count = run.results.test_images
    pictures = "test data" if count is None else f"{count:.0f} test pictures"
    if isinstance(told, dict):
        known = {name: share for name, share in told.items() if share is not None}
        steps = ", ".join(f"{name} {share:.2%}" for name, share in known.items())
        if known:
            value = "unknown" if last is None else f"{last:.2%}"
            yield Card("Accuracy", value, f"{steps}; {pictures}")
    elif told is not None:
        kind = "trained" if run.plan is None else "compact"
        yield Card("Accuracy", f"{told:.2%}", f"of the {kind} model, on {pictures}")
    elif run.metrics and run.metrics[-1].test_accuracy is not None:
        newest = run.metrics[-1]
        yield Card("Accuracy", f"{newest.test_accuracy:.2%}", f"after epoch {newest.epoch}")


def _certificate(run: Run) -> Iterator[Card]:
    told = run.results.certificate
    if told is not None:
        of = "of the pruning, before recovery: " if run.results.recovery is not None else ""
        differ = "" if told.max_error is None else f" differ by {told.max_error:.1e}"
        most = "" if told.tolerance is None else f"; up to {told.tolerance:.0e} is rounding"
        yield Card(
            "Certificate",
            "certified" if told.ok else "NOT certified",
            f"{of}the compact model and the original with the same units masked{differ}{most}",
            "good" if told.ok else "bad",
        )
    elif run.plan is not None and run.results.max_error is not None:
        # Training ends with an error, and without results, where the two are not the same.
        yield Card(
            "Certificate",
            "certified",
            "the compact model and the trained one with the same units masked differ by "
            f"{run.results.max_error:.1e}",
            "good",
        )


def _less(share: float) -> str:
    """What goes, with its sign.

    >>> _less(0.5), _less(-0.034), _less(0.0)
    ('−50.0%', '+3.4%', '0.0%')
    """
    text = f"{abs(share):.1%}"
    return text if text == "0.0%" else ("−" if share > 0 else "+") + text


def _count(number: float) -> str:
    """A count with three digits.

    >>> _count(125_485_706), _count(999_950), _count(950)
    ('125 M', '1.00 M', '950')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + f" {letter}"
    return f"{number:.0f}"
