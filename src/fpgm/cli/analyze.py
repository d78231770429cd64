"""`fpgm analyze`: what the weights of a model say about pruning it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fpgm.cli import _common as common
from fpgm.report.analysis.api import analyze as look
from fpgm.report.analysis.result import Analysis


def analyze(
    model: common.Model,
    weights: common.Weights = None,
    rate: Annotated[
        float, typer.Option(help="Share of filters that criteria are asked to choose.")
    ] = 0.4,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for each layer's norms and map of filters."),
    ] = None,
    format: Annotated[  # noqa: A002  (the option's name)
        str, typer.Option(help="Of the figures: png, svg or pdf.")
    ] = "svg",
    input: common.Input = None,  # noqa: A002  (the option's name)
    json: common.AsJson = False,
) -> None:
    """Show every layer's norms, redundancy and share of the cost, and how far criteria agree."""
    shape = common.input_shape(input, model)
    if figures is not None:
        from fpgm.report.charts.save import check_format

        check_format(format)
    with common.Steps(2 + (figures is not None)) as steps:
        with steps.step("build"):
            net = common.build(model, weights)
        with steps.step("look"), common.supposing(shape, input):
            found = look(net, common.example(shape), rate=rate)
        if figures is not None:
            with steps.step("draw"):
                from fpgm.report.charts.save import save_analysis

                save_analysis(found, figures, format, steps.inside)
    if json:
        common.show_json({"model": model, "input": shape, **found.to_dict()})
        return
    _show(found)
    if figures is not None:
        typer.echo(f"\nFigures are in {figures}.")


def _show(found: Analysis) -> None:
    common.show_table(
        ("layer", "filters", "rank", "deviation", "least", "nearest", "agree", "MACs", "params"),
        [
            (
                own.layer, str(own.filters), f"{own.effective_rank or 0:.1f}",
                f"{own.deviation:.2f}", f"{own.least:.3f}", f"{own.nearest_share or 0:.2f}",
                f"{own.overlap['fpgm and l2']:.0%}", f"{own.macs_share:.1%}",
                f"{own.params_share:.1%}",
            )
            for own in found.layers
        ],
    )  # fmt: skip
    typer.echo(
        "\nrank: of how many filters' worth a layer is. deviation, least: standard deviation and "
        "minimum of\nthe norms, nearest: median distance to the nearest other filter; all as "
        f"shares of the mean norm.\nagree: filters that both fpgm and l2 would remove at rate "
        f"{found.rate:g}."
    )
    typer.echo("\nWhat the paper's two requirements for pruning by norms say:")
    for words, layers in found.verdicts().items():
        typer.echo(f"  {len(layers)} of {len(found.layers)} layers: {words}.")
