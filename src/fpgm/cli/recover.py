"""`fpgm recover`: recover a pruned model, or recover it further, without pruning it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fpgm.cli import _common as common
from fpgm.cli import _data_options as data_opts
from fpgm.cli import _recovery_options as opt
from fpgm.cli._outcome import (
    Outcome,
    accuracy_change,
    accuracy_lines,
    cost_changes,
    next_command,
    recovery_lines,
    show_outcome,
    show_untrained,
)
from fpgm.errors import FileError, RequestError
from fpgm.models.checkpoint import shipped_file
from fpgm.utils.distributed import current_ranks
from fpgm.utils.run_files import SMALL, RunResults, check_out, read_results
from fpgm.workflow.pipeline import (
    RecoveryOptions,
    RecoveryRun,
    outdated_files,
    recovery_results,
    run_recovery,
    save_recovery,
)
from fpgm.workflow.pruned_folder import check_sources, has_own_weights, open_pruned


@common.divide_work
def recover(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder written by `fpgm prune` or `fpgm recover`."),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help=f"{opt.METHODS_HELP} Default: solve, or none if DIR was recovered before.",
        ),
    ] = None,
    distil: opt.Distil = 0.0,
    data: data_opts.Data = None,
    images: data_opts.Images = 1024,
    test: data_opts.Test = 2000,
    mean: data_opts.Mean = None,
    std: data_opts.Std = None,
    weights: common.Weights = None,
    trusted: common.Trusted = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write to this folder; default: replace the model in DIR."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the results of an earlier prune in --out.")
    ] = False,
    json: common.AsJson = False,
) -> None:
    """Recover a pruned model's accuracy, starting from its current weights."""
    ranks = current_ranks()
    results = ranks.on_first(lambda: read_results(folder))
    if out is not None and out.exists() and out.samefile(folder):
        out = None
    ranks.on_first(lambda: _check_place(folder, results, out, force))
    options = _options(folder, results, method, distil, images)
    opt.check_data(data, _data_option(options), needed=options.needs_data)
    weights = shipped_file(weights, results["model"])
    check_sources(folder, results, weights, trusted or ())
    with common.StepBar(3 + (data is not None)) as steps:
        pruned = open_pruned(folder, results, weights, steps)
        size = results["input"][-1]
        image_data = None if data is None else data_opts.open_images(data, mean, std, size)
        if image_data is not None and data is not None:
            image_data.check(pruned.original, data, str(folder))
        run = run_recovery(pruned, options, data=image_data, test=test, steps=steps)
    requested = opt.recovery_request(options, data, images, test)
    writes = run.changed or out is not None
    updated = recovery_results(run, asked=requested, command=context.obj)
    outdated = outdated_files(folder)
    if writes:
        save_recovery(run, out, updated, force=force)
    if not ranks.is_first:
        return  # only the first process prints
    place = out or folder
    removed = outdated if writes and out is None else []
    if json:
        about = {"folder": str(place), "changed": run.changed, "removed": removed}
        common.show_json({**about, **updated})
    else:
        _show(run, place, next_command("recover", place, updated), writes=writes)
        if removed:
            typer.echo(f"Removed, as they hold the earlier weights: {', '.join(removed)}")


def _check_place(folder: Path, results: RunResults, out: Path | None, force: bool) -> None:
    """Check early that the output folder can be written."""
    if out is not None:
        check_out(out, force=force)
    elif "row" in results:
        raise FileError(f"{folder} is a row of fpgm compare: write to another folder with --out.")


def _options(
    folder: Path, results: RunResults, method: str | None, distil: float, images: int
) -> RecoveryOptions:
    """Read the options; a folder that was recovered before is only distilled by default."""
    opt.check_distil(distil)
    opt.check_images(images)
    chosen = opt.read_method("--method", method)
    if chosen is None and not has_own_weights(results):
        chosen = "solve"
    if chosen is None and not distil:
        raise RequestError(
            f"{folder} was recovered before: pass --distil SECONDS to train it further, or a "
            "--method to apply again."
        )
    return RecoveryOptions(chosen, images, distil)


def _data_option(options: RecoveryOptions) -> str:
    """Name the option that needs images."""
    return f"--method {options.method}" if options.method in ("solve", "norms") else "--distil"


def _show(run: RecoveryRun, place: Path, follow: Outcome, *, writes: bool) -> None:
    """Print the outcome, then the details."""
    typer.secho(_outcome(run), bold=True)
    costs = cost_changes(run.folder.plan)
    show_outcome(accuracy_change(run.accuracy) | costs | {"File": str(place / SMALL)} | follow)
    results = run.folder.results
    show_untrained(results["model"], results.get("untrained"), pruned=True)
    typer.echo("")
    for line in recovery_lines(run.recovery) + accuracy_lines(run.accuracy):
        typer.echo(line)
    typer.echo(f"Written to {place}." if writes else f"{place} is unchanged.")


def _outcome(run: RecoveryRun) -> str:
    if not run.changed:
        return (
            "Not recovered: no weights were found that bring the outputs closer to the original's."
        )
    parts = []
    before, after = run.recovery.before, run.recovery.after
    if before is not None and after is not None:
        parts.append(f"output error {before:.3g} → {after:.3g}")
    shares = {} if run.accuracy is None else run.accuracy.shares
    if "recovered" in shares:
        start = shares.get("before", shares["compact"])
        parts.append(
            f"accuracy {start:.2%} → {shares['recovered']:.2%} (original {shares['original']:.2%})"
        )
    return f"Recovered: {', '.join(parts)}." if parts else "Recovered."
