"""`fpgm prune`: plan, compact, verify, and write the small model with everything to check it by."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fpgm._version import __version__
from fpgm.cli import common
from fpgm.cli import results as res
from fpgm.compact import compact
from fpgm.criteria import DISTANCES, NAMES
from fpgm.errors import RequestError
from fpgm.files import file_sha256
from fpgm.plan import Plan
from fpgm.planning import plan
from fpgm.verify import Certificate
from fpgm.verify import verify as certify


def prune(
    context: typer.Context,
    model: common.Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the results.")],
    rate: Annotated[
        float | None, typer.Option(help="Share of units to remove from every group.")
    ] = None,
    macs: Annotated[float | None, typer.Option(help="Share of MACs to remove.")] = None,
    params: Annotated[float | None, typer.Option(help="Share of parameters to remove.")] = None,
    rates: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=RATE", help="Rate of some layers; may be repeated."),
    ] = None,
    criterion: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "fpgm",
    distance: Annotated[str, typer.Option(help=f"One of {', '.join(DISTANCES)}.")] = "l2",
    residual: Annotated[
        str, typer.Option(metavar="POLICY", help="Residual streams: coupled or independent.")
    ] = "coupled",
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Layers to leave whole; may be repeated."),
    ] = None,
    align: Annotated[int, typer.Option(help="Multiple that widths are brought to; 1 is off.")] = 8,
    rounding: Annotated[
        str, typer.Option(help="nearest, or paper: int(n · rate) units go.")
    ] = "nearest",
    min_channels: Annotated[int, typer.Option(help="Least units a layer keeps.")] = 1,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Also prune under norms over channels.")
    ] = False,
    weights: common.Weights = None,
    input: common.Input = None,  # noqa: A002  (the option's name)
    force: Annotated[
        bool, typer.Option("--force", help="Replace the results of an earlier prune.")
    ] = False,
    json: common.AsJson = False,
) -> None:
    """Remove units from a model, prove the result, and write it to a folder."""
    res.check_folder(out, force)
    if rate is None and macs is None and params is None and not rates:
        raise RequestError("Say how much to remove: --rate, --macs, --params or --rates.")
    options: dict[str, Any] = {
        "rate": rate, "macs": macs, "params": params, "rates": read_rates(rates or []),
        "criterion": criterion, "distance": distance, "residual": residual,
        "ignore": ignore or [], "align": align, "rounding": rounding,
        "min_channels": min_channels, "approximate": approximate,
    }  # fmt: skip
    shape = common.input_shape(input, model)
    with common.Steps(4) as steps:
        with steps.step("build"):
            net = common.build(model, weights)
            x = common.example(shape)
        with steps.step("watch and plan"), common.supposing(shape, input):
            made = plan(net, x, **options)
        if not made.cuts:
            raise RequestError("No unit would go: ask for more, or for finer steps with --align 1.")
        with steps.step("compact"):
            small = compact(net, made)
        with steps.step("verify"):
            certificate = certify(net, made, x, compacted=small).check()
    results = {
        "format": res.FORMAT,
        "model": model,
        "weights": {"file": weights.name, "sha256": file_sha256(weights)} if weights else None,
        "original_sha256": res.tensors_sha256(net),
        "input": shape,
        "asked": {name: value for name, value in options.items() if value not in (None, {}, [])},
        "achieved": res.achieved(made),
        "certificate": res.certificate_dict(certificate),
        "versions": {
            "fpgm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seconds": steps.seconds,
        "command": context.obj,
    }
    res.write(out, small, made, results)
    if json:
        common.show_json(results)
    else:
        _show(out, made, certificate)


def read_rates(items: list[str]) -> dict[str, float]:
    """Rates by layer pattern from the command line.

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
            raise RequestError(f"--rates is {item!r}: write a pattern and a share, layer3.*=0.2.")
    return rates


def _show(out: Path, made: Plan, certificate: Certificate) -> None:
    common.show_table(
        ("group", "layers", "units", "kept", "removed", "exact"),
        [
            (g.name, str(len(g.layers)), str(g.units), str(g.kept), f"{g.rate:.1%}",
             "yes" if g.exact else "no")
            for g in made.groups
        ],
    )  # fmt: skip
    common.show_frozen(made.frozen)
    typer.echo("")
    common.show_table(
        ("", "before", "after", "removed"),
        [
            ("MACs", f"{made.macs_before:,}", f"{made.macs_after:,}", f"{made.macs_removed:.1%}"),
            ("parameters", f"{made.params_before:,}", f"{made.params_after:,}",
             f"{made.params_removed:.1%}"),
        ],
    )  # fmt: skip
    for note in made.notes:
        typer.echo(f"\nNote: {note}")
    typer.echo(f"\n{res.certificate_line(certificate)}")
    typer.echo(f"Written to {out}: {res.SMALL}, {res.PLAN}, {res.RESULTS}")
