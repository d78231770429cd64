"""`fpgm sensitivity`: which groups can spare how many units, measured without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fpgm.cli import common
from fpgm.cli import pictures as pic
from fpgm.criteria import NAMES
from fpgm.errors import FileError, RequestError
from fpgm.files import write_text, writing
from fpgm.harm.result import Sensitivity
from fpgm.sensitivity import sensitivity as measure
from fpgm.wording import reason

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
        typer.Option(metavar="FILE", help="Also write it, for fpgm prune --allocate FILE."),
    ] = None,
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
            net, common.example(shape), pictures, images=images, progress=bar.show, **options
        )
    if out is not None:
        with writing(out):
            write_text(out, found.to_json(indent=1) + "\n")
    if json:
        common.show_json(
            {
                "model": model,
                "inputs": found.inputs,
                "asked": dict(found.asked),
                "groups": [
                    {"name": g.name, "units": g.units, "harm": list(g.harm)} for g in found.groups
                ],
            }
        )
    else:
        _show(found)


def read(file: Path) -> Sensitivity:
    """What `fpgm sensitivity --out` wrote."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"{file} cannot be read: {reason(error)}. --allocate takes uniform, sensitivity, or "
            "such a file."
        ) from error
    try:
        return Sensitivity.from_json(text)
    except FileError as error:
        raise FileError(f"{file}: {error}") from error


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
