"""`fpgm verify`: rebuild the original and verify the results in a folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fpgm.cli import _common as common
from fpgm.cli._outcome import show_certificate, show_untrained
from fpgm.models.checkpoint import shipped_file
from fpgm.pruning.verification import verify as certify
from fpgm.utils.run_files import read_results
from fpgm.utils.text import escape_text
from fpgm.workflow.original_model import example_input
from fpgm.workflow.pruned_folder import certificate_dict, check_sources, costs_dict, open_pruned


def verify(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder written by `fpgm prune` or `fpgm compare`."),
    ],
    weights: common.Weights = None,
    trusted: common.Trusted = None,
    json: common.AsJson = False,
) -> None:
    """Verify that the compact model in a folder matches the masked original."""
    results = read_results(folder)
    weights = shipped_file(weights, results["model"])
    check_sources(folder, results, weights, trusted or ())
    with common.StepBar(3) as steps:
        pruned = open_pruned(folder, results, weights, steps)
        plan, recovered = pruned.plan, results.get("recovery") is not None
        with steps.step("verify"):
            # For recovered weights, verify the structure, and check the weights by their digest.
            small = pruned.plain if pruned.own_weights else pruned.small
            x = example_input(results["input"])
            certificate = certify(pruned.original, plan, x, compacted=small)
    if json:
        common.show_json(
            {
                "folder": str(folder),
                "model": results["model"],
                "achieved": costs_dict(plan),
                "certificate": certificate_dict(certificate),
                "recovered": recovered,
                "own_weights": pruned.own_weights,
            }
        )
    else:
        typer.echo(
            f"{escape_text(results['model'])}: MACs −{plan.macs_removed:.1%}, "
            f"parameters −{plan.params_removed:.1%}"
        )
        show_certificate(certificate)
        show_untrained(results["model"], results.get("untrained"), pruned=True)
        if pruned.own_weights:
            typer.echo(
                "This verifies the structure, before recovery. The weights are those that "
                "recovery saved (same sha256)."
                if recovered
                else "This verifies the structure. The weights are those that fpgm compare saved "
                "(same sha256)."
            )
    certificate.check()
