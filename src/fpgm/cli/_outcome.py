"""Format the result of a command as text: the outcome in a few bold lines, then sentences."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import typer

from fpgm.models import assets
from fpgm.models.registry import names_code
from fpgm.pruning.plan import Latency, Plan
from fpgm.pruning.plan_text import format_change
from fpgm.pruning.verification import Certificate
from fpgm.recovery.api import PRUNED, Recovery
from fpgm.utils.run_files import RunResults
from fpgm.utils.text import escape_text, format_number
from fpgm.workflow.pipeline import AccuracyResult

Outcome = dict[str, str]
"""What came of a command, by a short name; `show_outcome` prints it."""


def show_outcome(outcome: Outcome) -> None:
    """Print one bold line for every entry, with the names in a column."""
    width = max(map(len, outcome))
    for name, value in outcome.items():
        typer.secho(f"{name:<{width}}  {value}", bold=True)


def show_untrained(model: str, untrained: bool | None, *, pruned: bool = False) -> None:
    """Print a warning if the original has random weights.

    Args:
        model: its spec.
        untrained: whether the weights are random.
        pruned: whether the model was pruned before, so that weights given now come too late.
    """
    if untrained:
        advice = "Prune again with trained ones:" if pruned else "Give trained ones with"
        typer.secho(
            f"UNTRAINED: {escape_text(model)} has random weights, so its outputs mean "
            f"nothing, pruned or not. {advice} --weights FILE.",
            bold=True,
            fg="yellow",
        )


def show_certificate(certificate: Certificate) -> None:
    """Print a certificate, in green if it holds."""
    typer.secho(certificate_line(certificate), fg="green" if certificate.ok else "red")


def accuracy_change(accuracy: AccuracyResult | None) -> Outcome:
    """Format the accuracy of the original and of the model that was written, if measured.

    >>> accuracy_change(AccuracyResult({"original": 0.9, "compact": 0.2, "recovered": 0.89}, 2000))
    {'Accuracy': '90.00% → 89.00% (2,000 test images)'}
    """
    shares = {} if accuracy is None else accuracy.shares
    after = shares.get("recovered", shares.get("compact"))
    if accuracy is None or after is None or "original" not in shares:
        return {}
    change = f"{shares['original']:.2%} → {after:.2%}"
    return {"Accuracy": f"{change} ({accuracy.inputs:,} test images)"}


def cost_changes(plan: Plan) -> Outcome:
    """Format MACs, parameters, and the latency if it was measured reliably, before and after."""
    changes = {
        "MACs": f"{plan.macs_before:,} → {plan.macs_after:,} ({format_change(plan.macs_removed)})",
        "Parameters": f"{plan.params_before:,} → {plan.params_after:,} "
        f"({format_change(plan.params_removed)})",
    }
    if plan.latency is not None and plan.latency.crowd is None:
        changes["Latency"] = (
            f"{format_number(1000 * plan.latency.seconds_before)} ms → "
            f"{format_number(1000 * plan.latency.seconds_after)} ms "
            f"({format_change(plan.latency.measured)}, {escape_text(plan.latency.backend)})"
        )
    return changes


def next_command(
    command: str, folder: Path, results: RunResults, weights: Path | None = None
) -> Outcome:
    """Name the command that usually follows one that worked on a folder.

    Args:
        command: that has just run.
        folder: of a pruned model.
        results: its results.
        weights: the file that the original was built with, if recovery has to be given it.
    """
    trust = f" --model {quote(results['model'])}" if names_code(results["model"]) else ""
    place = quote(str(folder))
    if command == "prune" and not results.get("untrained") and "recovery" not in results:
        data = quote(results["asked"].get("data", "NAME"))
        known = weights is None or weights in assets.SHIPPED_WEIGHTS.values()
        file = "" if known else f" --weights {quote(str(weights))}"
        return {"Next": f"fpgm recover {place} --data {data}{file}{trust}"}
    if command == "export":
        return {"Next": f"fpgm report {place} --open"}
    return {"Next": f"fpgm {'export' if command == 'bench' else 'bench'} {place}{trust}"}


def latency_line(latency: Latency) -> str:
    """Format the time before and after."""
    return (
        f"Time per call in {escape_text(latency.backend)}, threads: {latency.threads}: "
        f"{format_number(1000 * latency.seconds_before)} ms → "
        f"{format_number(1000 * latency.seconds_after)} ms, {latency.measured:.1%} less "
        f"(requested {latency.asked:.1%}, predicted {latency.predicted:.1%})."
        f"{f' Unreliable: {escape_text(latency.crowd)}.' if latency.crowd else ''}"
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
    return [f"Accuracy on {accuracy.inputs:,} test images: {shares}."]
