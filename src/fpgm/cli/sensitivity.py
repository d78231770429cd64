"""`fpgm sensitivity`: which groups can spare how many units, measured on pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fpgm.cli import _common as common
from fpgm.cli import _data_options as pic
from fpgm.criteria import NAMES
from fpgm.errors import FileError, RequestError
from fpgm.recovery.sensitivity.api import RATES as TRIED
from fpgm.recovery.sensitivity.api import sensitivity as measure
from fpgm.recovery.sensitivity.result import Sensitivity

RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def sensitivity(
    model: common.Model,
    data: pic.Data = None,
    images: pic.Images = 512,
    criterion: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "fpgm",
    residual: Annotated[
        str, typer.Option(metavar="POLICY", help="Residual streams: coupled or independent.")
    ] = "coupled",
    weights: common.Weights = None,
    input: common.Input = None,  # noqa: A002  (the option's name)
    mean: pic.Mean = None,
    std: pic.Std = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write it, for fpgm prune --allocate FILE; if it is there, go on from it.",
        ),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option(help="Also count accuracy on those pictures, group by group.")
    ] = True,
    trials: Annotated[
        bool,
        typer.Option(help="Also try what is foretold; --no-trials if training is to follow."),
    ] = True,
    json: common.AsJson = False,
) -> None:
    """Show what removing a share of each group does to the outputs once the rest is solved anew."""
    if data is None:
        raise RequestError("Sensitivity is measured on pictures: give --data.")
    shape = common.input_shape(input, model)
    options: dict[str, Any] = {"criterion": criterion, "residual": residual}
    net = common.build(model, weights)
    pictures = pic.open_pictures(data, mean, std, shape[-1])
    pictures.check(net, data, model)
    with common.supposing(shape, input), common.LayerBar() as bar:
        found = measure(
            net, common.example(shape), pictures,
            images=images, rates=TRIED if accuracy else (), cache=out, trials=trials,
            progress=bar.show, **options,
        )  # fmt: skip
    if json:
        common.show_json(
            {
                "model": model,
                "inputs": found.inputs,
                "asked": dict(found.asked),
                "accuracy": found.accuracy,
                "groups": [
                    {
                        "name": g.name,
                        "units": g.units,
                        "harm": list(g.harm),
                        "accuracy": dict(g.accuracy),
                    }
                    for g in found.groups
                ],
            }
        )
    else:
        _show(found)


def read(file: Path) -> Sensitivity:
    """What `fpgm sensitivity --out` wrote."""
    try:
        return Sensitivity.read(file)
    except FileError as error:
        raise FileError(
            f"{error} --allocate takes uniform, sensitivity, or a file of fpgm sensitivity."
        ) from error


def _show(found: Sensitivity) -> None:
    typer.echo(
        f"Error of the outputs over {found.inputs} inputs, in thousandths of their squares, when a "
        "share of\none group is removed and its readers are solved anew:\n"
    )
    common.show_table(
        ("group", "units", *(f"{rate:.0%}" for rate in RATES)),
        [
            (g.name, str(g.units), *(f"{1000 * g.at(rate):.3g}" for rate in RATES))
            for g in found.groups
        ],
    )
    rates = list(dict.fromkeys(rate for g in found.groups for rate in g.accuracy))
    if found.accuracy is None or not rates:
        return
    typer.echo(f"\nAccuracy on the same inputs, {found.accuracy:.1%} with nothing removed:\n")
    common.show_table(
        ("group", "units", *(f"{float(rate):.0%}" for rate in rates)),
        [
            (g.name, str(g.units), *(_share(g.accuracy.get(rate)) for rate in rates))
            for g in found.groups
        ],
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
