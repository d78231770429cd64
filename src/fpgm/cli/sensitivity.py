"""`fpgm sensitivity`: how much pruning each group tolerates, measured on images."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from fpgm.cli import _common as common
from fpgm.cli import _data_options as data_opts
from fpgm.errors import FileError, RequestError
from fpgm.models.checkpoint import shipped_file
from fpgm.recovery.sensitivity.api import RATES as TRIED
from fpgm.recovery.sensitivity.api import sensitivity as measure
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.utils.distributed import current_ranks
from fpgm.utils.text import format_number
from fpgm.workflow.original_model import build_model, example_input

RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@common.divide_work
def sensitivity(
    model: common.Model,
    data: data_opts.Data = None,
    images: data_opts.Images = 512,
    criterion: common.Criterion = "fpgm",
    residual: common.Residual = "coupled",
    weights: common.Weights = None,
    input: common.Input = None,  # noqa: A002  (the option's name)
    mean: data_opts.Mean = None,
    std: data_opts.Std = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the result here, for prune --allocate FILE; resumes an interrupted run.",
        ),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option(help="Also measure the accuracy with each group pruned.")
    ] = True,
    trials: Annotated[
        bool,
        typer.Option(
            help="Correct estimates by trial prunings; use --no-trials if training follows."
        ),
    ] = True,
    all_rows: common.All = False,
    json: common.AsJson = False,
) -> None:
    """Measure how much the outputs change if a fraction of each group is removed."""
    if data is None:
        raise RequestError("Sensitivity is measured on images: pass --data.")
    shape = common.input_shape(input, model)
    weights = shipped_file(weights, model)
    options: dict[str, Any] = {"criterion": criterion, "residual": residual}
    net = build_model(model, weights)
    image_data = data_opts.open_images(data, mean, std, shape[-1])
    image_data.check(net, data, model)
    with common.explain_assumed_shape(shape, input), common.LayerBar() as bar:
        result = measure(
            net, example_input(shape), image_data,
            images=images, rates=TRIED if accuracy else (), cache=out, trials=trials,
            progress=bar.show, **options,
        )  # fmt: skip
    if not current_ranks().is_first:
        return  # only the first process prints
    if json:
        common.show_json(
            {
                "model": model,
                "inputs": result.inputs,
                "asked": dict(result.asked),
                "accuracy": result.accuracy,
                "groups": [
                    {
                        "name": g.name,
                        "units": g.units,
                        "harm": list(g.harm),
                        "accuracy": dict(g.accuracy),
                    }
                    for g in result.groups
                ],
            }
        )
    else:
        _show(result, None if all_rows else common.ROWS)
        if out is not None:
            typer.echo(
                f"\nWritten to {out}: give it to fpgm prune as --allocate {quote(str(out))}."
            )


def read(file: Path) -> Sensitivity:
    """Read a file written by `fpgm sensitivity --out`."""
    try:
        return Sensitivity.read(file)
    except FileError as error:
        raise FileError(
            f"{error} --allocate takes uniform, sensitivity, or a file of fpgm sensitivity."
        ) from error


def _show(result: Sensitivity, most: int | None) -> None:
    typer.echo(
        f"Relative squared error of the outputs × 1,000, over {result.inputs} inputs, when a "
        "fraction of\none group is removed and its consumers are solved again:\n"
    )
    common.show_table(
        ("group", "units", *(f"{rate:.0%}" for rate in RATES)),
        [
            (g.name, str(g.units), *(format_number(1000 * g.at(rate)) for rate in RATES))
            for g in result.groups
        ],
        most=most,
    )
    rates = list(dict.fromkeys(rate for g in result.groups for rate in g.accuracy))
    if result.accuracy is None or not rates:
        return
    typer.echo(f"\nAccuracy on the same inputs, {result.accuracy:.1%} with nothing removed:\n")
    common.show_table(
        ("group", "units", *(f"{float(rate):.0%}" for rate in rates)),
        [
            (g.name, str(g.units), *(_format_percent(g.accuracy.get(rate)) for rate in rates))
            for g in result.groups
        ],
        most=most,
    )


def _format_percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
