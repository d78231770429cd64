"""`fpgm prune`: plan, compact, verify, and write the result with everything needed to check it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from fpgm.cli import _common as common
from fpgm.cli import _data_options as data_opts
from fpgm.cli import _recovery_options as opt
from fpgm.cli import sensitivity as sensitivity_command
from fpgm.cli._outcome import (
    accuracy_change,
    accuracy_lines,
    cost_changes,
    latency_line,
    next_command,
    recovery_lines,
    show_certificate,
    show_outcome,
    show_untrained,
)
from fpgm.criteria import DISTANCES
from fpgm.errors import RequestError
from fpgm.models.checkpoint import shipped_file
from fpgm.models.registry import has_guessed_shape
from fpgm.planning.width_rounding import ALIGN, Rounding
from fpgm.pruning.plan_text import plan_advice
from fpgm.tracing.residual import Residual
from fpgm.utils.distributed import current_ranks
from fpgm.utils.run_files import ANALYSIS, PLAN, RESULTS, SENSITIVITY, SMALL, check_out
from fpgm.workflow.original_model import build_model, example_input, shape_text
from fpgm.workflow.pipeline import (
    Origin,
    PruningRun,
    RecoveryOptions,
    run_pruning,
    save_pruning,
)
from fpgm.workflow.plan_request import PlanRequest


@common.divide_work
def prune(
    context: typer.Context,
    model: common.Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write the results to this folder.")],
    rate: Annotated[
        float | None,
        typer.Option(
            parser=common.read_fraction,
            metavar="FRACTION",
            help="Remove this fraction of units from every group; 0.4 is 40 %.",
        ),
    ] = None,
    macs: Annotated[
        float | None,
        typer.Option(
            parser=common.read_fraction, metavar="FRACTION", help="Remove this fraction of MACs."
        ),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(
            parser=common.read_fraction,
            metavar="FRACTION",
            help="Remove this fraction of parameters.",
        ),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(
            parser=common.read_fraction,
            metavar="FRACTION",
            help="Remove this fraction of the latency, measured in --backend.",
        ),
    ] = None,
    backend: common.Backend = "eager",
    threads: common.Threads = None,
    rates: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=RATE", help="Set the rate of some layers; may be repeated."),
    ] = None,
    criterion: common.Criterion = "fpgm",
    distance: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Measure distances by one of {', '.join(DISTANCES)}."),
    ] = "l2",
    residual: common.Residual = "coupled",
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Do not prune these layers; may be repeated."),
    ] = None,
    align: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Round widths to multiples of this; 1: off, auto: measure it in --backend.",
        ),
    ] = str(ALIGN),
    rounding: Annotated[
        str, typer.Option(help="nearest multiple, or paper: remove int(n · rate) units.")
    ] = "nearest",
    min_channels: Annotated[
        int, typer.Option(help="Keep at least this many channels in a layer.")
    ] = 1,
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate",
            help="Also prune inputs of norms over channels (LayerNorm), whose statistics change.",
        ),
    ] = False,
    allocate: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Set rates: uniform, by sensitivity (needs --data), or by a file that fpgm "
            "sensitivity wrote.",
        ),
    ] = "uniform",
    recover: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help=opt.METHODS_HELP,
        ),
    ] = None,
    distil: opt.Distil = 0.0,
    data: data_opts.Data = None,
    images: data_opts.Images = 1024,
    test: data_opts.Test = 2000,
    mean: data_opts.Mean = None,
    std: data_opts.Std = None,
    weights: common.Weights = None,
    input: common.Input = None,  # noqa: A002  (the option's name)
    force: Annotated[
        bool, typer.Option("--force", help="Replace the results of an earlier prune.")
    ] = False,
    all_rows: common.All = False,
    json: common.AsJson = False,
) -> None:
    """Prune a model, verify the result, and write it to a folder."""
    ranks = current_ranks()
    ranks.on_first(lambda: check_out(out, force=force))
    if all(amount is None for amount in (rate, macs, params, latency)) and not rates:
        raise RequestError(
            "Say how much to remove: --rate, --macs, --params, --latency or --rates."
        )
    request = PlanRequest(
        rate=rate, macs=macs, params=params, latency=latency, rates=read_rates(rates or []),
        criterion=criterion, distance=distance, residual=cast(Residual, residual),
        ignore=ignore or [], align=read_align(align), rounding=cast(Rounding, rounding),
        min_channels=min_channels, approximate=approximate, backend=backend, threads=threads,
    )  # fmt: skip
    recovery = _recovery(recover, distil, images)
    opt.check_images(images)
    opt.check_data(data, f"--recover {recover}", needed=recover in ("solve", "norms"))
    opt.check_data(data, "--allocate sensitivity", needed=allocate == "sensitivity")
    opt.check_data(data, "--distil", needed=distil > 0)
    shape = common.input_shape(input, model)
    weights = shipped_file(weights, model)
    further = (allocate == "sensitivity", recovery is not None, data is not None)
    with common.StepBar(4 + sum(further)) as steps:
        with steps.step("build"):
            net = build_model(model, weights)
            x = example_input(shape)
            image_data = None if data is None else data_opts.open_images(data, mean, std, shape[-1])
            if image_data is not None and data is not None:
                image_data.check(net, data, model)
        if allocate == "sensitivity":
            request = replace(request, allocate="sensitivity")
        elif allocate != "uniform":
            request = replace(request, allocate=sensitivity_command.read(Path(allocate)))
        with common.explain_assumed_shape(shape, input):
            run = run_pruning(
                net, x, request, recovery=recovery, data=image_data, test=test, steps=steps
            )
    about = {"allocate": None if allocate == "uniform" else allocate}
    requested = about | opt.recovery_request(recovery, data, images, test)
    origin = Origin(model, weights, shape)
    results = save_pruning(run, out, origin, asked=requested, command=context.obj, force=force)
    if not ranks.is_first:
        return  # only the first process prints
    if json:
        common.show_json(results)
    else:
        outcome = accuracy_change(run.accuracy) | cost_changes(run.plan)
        follow = next_command("prune", out, results, weights)
        show_outcome(outcome | {"File": str(out / SMALL)} | follow)
        show_untrained(model, origin.untrained)
        looked_at = _describe_input(shape, assumed=input is None and has_guessed_shape(model))
        _show_details(run, looked_at, None if all_rows else common.ROWS)
        written = [SMALL, PLAN, RESULTS, ANALYSIS]
        written += [SENSITIVITY] if run.sensitivity is not None else []
        typer.echo(f"Written to {out}: {', '.join(written)}")


def _recovery(recover: str | None, distil: float, images: int) -> RecoveryOptions | None:
    """Read `--recover` and `--distil`."""
    opt.check_distil(distil)
    if recover is None and distil:
        raise RequestError("--distil starts from a recovered model: add --recover solve.")
    method = opt.read_method("--recover", recover)
    return None if method is None else RecoveryOptions(method, images, distil)


def read_align(text: str) -> int | Literal["auto"]:
    """Read `--align`: an integer or `auto`.

    >>> read_align("8"), read_align("auto")
    (8, 'auto')
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise RequestError(f"--align is {text!r}: give an integer of at least 1, or auto.")
    return int(text)


def read_rates(items: list[str]) -> dict[str, float]:
    """Read `--rates`: rates by layer pattern.

    >>> read_rates(["layer3.*=0.2"])
    {'layer3.*': 0.2}
    """
    rates = {}
    for item in items:
        pattern, equals, rate = item.rpartition("=")
        try:
            rates[pattern] = float(rate)
        except ValueError:
            equals = ""
        if not equals or not pattern:
            raise RequestError(f"--rates is {item!r}: write a pattern and a rate, layer3.*=0.2.")
    return rates


def _describe_input(shape: Sequence[int], *, assumed: bool) -> str:
    """Describe the input that MACs and the certificate refer to, and how to change it."""
    text = f"Input: {shape_text(shape)}"
    return f"{text} (assumed; change it with --input)." if assumed else f"{text}."


def _show_details(run: PruningRun, looked_at: str, most: int | None) -> None:
    """Print everything that comes after the outcome, with at most so many rows in a table."""
    plan = run.plan
    typer.echo("")
    show_certificate(run.certificate)
    for line in recovery_lines(run.recovery) + accuracy_lines(run.accuracy):
        typer.echo(line)
    if plan.latency is not None:
        typer.echo(latency_line(plan.latency))
    typer.echo(looked_at)
    for note in plan.notes:
        typer.echo(f"Note: {note}")
    for kind, advice in plan_advice(plan):
        typer.secho(f"{kind[0].upper()}{kind[1:]}: {advice}", fg="yellow")
    typer.echo("")
    common.show_table(
        ("group", "layers", "units", "kept", "removed", "exact"),
        [
            (g.name, str(len(g.layers)), str(g.units), str(g.kept), f"{g.rate:.1%}",
             "yes" if g.exact else "no")
            for g in plan.groups
        ],
        most=most,
    )  # fmt: skip
    common.show_frozen(plan.frozen, most)
    fraction = plan.macs_frozen / plan.macs_before if plan.macs_frozen else 0.0
    if fraction >= 0.0005:  # less prints as 0.0%
        typer.echo(
            f"\n{fraction:.1%} of the MACs are fixed: none of their channels can be removed."
        )
    typer.echo("")
