"""`fpgm analyze`: statistics of a model's weights that matter for pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fpgm.cli import _common as common
from fpgm.models.checkpoint import shipped_file
from fpgm.report.analysis.api import analyze as look
from fpgm.report.analysis.result import Analysis
from fpgm.workflow.original_model import build_model, example_input


def analyze(
    model: common.Model,
    weights: common.Weights = None,
    rate: Annotated[float, typer.Option(help="Compare criteria at this pruning rate.")] = 0.4,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Draw each layer's norms and filter map into this folder."
        ),
    ] = None,
    format: Annotated[  # noqa: A002  (the option's name)
        str, typer.Option(help="Set the format of figures: png, svg or pdf.")
    ] = "svg",
    input: common.Input = None,  # noqa: A002  (the option's name)
    all_rows: common.All = False,
    json: common.AsJson = False,
) -> None:
    """Show the filter norms, redundancy and cost of each layer, and how much criteria agree."""
    shape = common.input_shape(input, model)
    weights = shipped_file(weights, model)
    if figures is not None:
        from fpgm.report.charts.image_files import check_format

        check_format(format)
    with common.StepBar(2 + (figures is not None)) as steps:
        with steps.step("build"):
            net = build_model(model, weights)
        with steps.step("look"), common.explain_assumed_shape(shape, input):
            analysis = look(net, example_input(shape), rate=rate)
        if figures is not None:
            with steps.step("draw"):
                from fpgm.report.charts.image_files import save_analysis

                save_analysis(analysis, figures, format, steps.report_layer)
    if json:
        common.show_json({"model": model, "input": shape, **analysis.to_dict()})
        return
    _print_summary(analysis, None if all_rows else common.ROWS)
    if figures is not None:
        typer.echo(f"\nFigures are in {figures}.")


def _print_summary(analysis: Analysis, most: int | None) -> None:
    common.show_table(
        ("layer", "filters", "rank", "deviation", "least", "nearest", "agree", "MACs", "params"),
        [
            (
                layer.layer, str(layer.filters), f"{layer.effective_rank or 0:.1f}",
                f"{layer.deviation:.2f}", f"{layer.least:.3f}", f"{layer.nearest_ratio or 0:.2f}",
                f"{layer.overlap['fpgm and l2']:.0%}", f"{layer.macs_share:.1%}",
                f"{layer.params_share:.1%}",
            )
            for layer in analysis.layers
        ],
        most=most,
    )  # fmt: skip
    typer.echo(
        "\nrank: effective rank of the filters. deviation, least: standard deviation and minimum "
        "of the norms.\nnearest: median distance to the nearest other filter. These three are "
        "fractions of the mean norm.\nagree: fraction of the filters to remove at rate "
        f"{analysis.rate:g} that fpgm and l2 both select."
    )
    typer.echo("\nThe paper's two requirements for pruning by norms:")
    for words, layers in analysis.verdicts().items():
        typer.echo(f"  {len(layers)} of {len(analysis.layers)} layers: {words}.")
