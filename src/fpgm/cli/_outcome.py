"""Format the result of a command as text."""

from __future__ import annotations

from fpgm.pruning.plan import Latency
from fpgm.pruning.verification import Certificate
from fpgm.recovery.api import PRUNED, Recovery
from fpgm.utils.text import escape_text, format_number
from fpgm.workflow.pipeline import AccuracyResult


def latency_line(latency: Latency) -> str:
    """Format the time before and after."""
    return (
        f"Time per call in {escape_text(latency.backend)}, threads: {latency.threads}: "
        f"{format_number(1000 * latency.seconds_before)} ms → "
        f"{format_number(1000 * latency.seconds_after)} ms, {latency.measured:.1%} less "
        f"(requested {latency.asked:.1%}, predicted {latency.predicted:.1%})."
    )


def certificate_line(certificate: Certificate) -> str:
    """Format a certificate."""
    verdict = "Verified" if certificate.ok else "NOT verified"
    kind = "" if certificate.exact else " (approximate: norms over fewer channels)"
    where = f", most at {certificate.worst}" if certificate.worst and not certificate.ok else ""
    notes = "".join(f" {note}" for note in certificate.notes)
    return (
        f"{verdict} on {certificate.inputs} inputs in {certificate.precision}: the compact model "
        f"differs from the masked original by {certificate.max_error:.1e}{where} (tolerance "
        f"{certificate.tolerance:.0e}); masking changes the outputs by {certificate.moved:.3g}"
        f"{kind}.{notes}"
    )


def recovery_lines(recovery: Recovery | None) -> list[str]:
    """Format the outcome of a recovery."""
    if recovery is None:
        return []
    best = ""
    if len(recovery.candidates) > 1:
        kept = "none, the weights were kept" if recovery.kept == PRUNED else recovery.kept
        best = f"; best result: {kept}"
    lines = [f"Recovery took {recovery.seconds:.0f} s on {recovery.inputs} inputs{best}."]
    agreements = {c.name: c.agreement for c in recovery.candidates}
    first, last = agreements.get(PRUNED), agreements.get(recovery.kept)
    if first is not None and last is not None:
        lines.append(
            f"The predicted class is the original's for {last:.1%} of inputs "
            f"({first:.1%} before recovery)."
        )
    before, after = recovery.before, recovery.after
    if before is not None and after is not None and after < before:
        lines.append(
            f"The relative squared error of the outputs fell from {before:.3g} to {after:.3g}."
        )
    return lines + [f"Note: {note}" for note in recovery.notes]


def accuracy_lines(accuracy: AccuracyResult | None) -> list[str]:
    """Format the accuracies, if they were measured."""
    if accuracy is None or not accuracy.shares:
        return []
    shares = ", ".join(f"{name} {share:.2%}" for name, share in accuracy.shares.items())
    return [f"Accuracy on {accuracy.inputs} test images: {shares}."]
