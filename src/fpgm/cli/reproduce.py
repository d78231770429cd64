"""`fpgm reproduce`: the paper's tables and figures by name, in full or on two cores."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from fpgm.cli import common
from fpgm.cli import pictures as pic
from fpgm.errors import FpgmError, RequestError
from fpgm.models.weights import load_weights
from fpgm.reproduce import TABLES, Results, Table, full
from fpgm.reproduce.quick import Data, Effort, Quick

FIGURES = ("fig3", "fig4", "fig5")
SCALES = ("quick", "full")
DRAWN = "svg"


def reproduce(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="TABLE|FIGURE", help=", ".join((*TABLES, *FIGURES)))
    ],
    scale: Annotated[str, typer.Option(help="quick, or full: the paper's schedule.")] = "quick",
    rows: Annotated[
        str, typer.Option(metavar="PATTERN", help="Only rows whose key matches, as resnet20-*.")
    ] = "*",
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Seeds 0 to N-1.")] = 1,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where rows are kept.")] = Path(
        "runs/reproduce"
    ),
    weights: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Trained weights: cifar10_resnet56.safetensors, …"),
    ] = Path("weights"),
    data: Annotated[str, typer.Option(metavar="NAME|DIR", help="As for fpgm prune.")] = "cifar10",
    steps: Annotated[int, typer.Option(min=1, help="Of training a quick row.")] = Effort.steps,
    epochs: Annotated[int, typer.Option(min=1, help="From scratch, quick.")] = Effort.epochs,
    images: pic.Images = Effort.images,
    test: pic.Test = 10_000,
    mean: pic.Mean = None,
    std: pic.Std = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Replace a value of a full recipe."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Name the rows, what makes each and how long it takes.")
    ] = False,
    json: common.AsJson = False,
) -> None:
    """Make rows of the paper's tables again, and set them beside what it prints."""
    if scale not in SCALES:
        raise RequestError(f"--scale is {scale!r}: give quick or full.")
    if name in FIGURES:
        _draw(name, scale, out, weights, (data, mean, std), json)
        return
    if name not in TABLES:
        raise RequestError(f"There is no {name!r}: give one of {', '.join((*TABLES, *FIGURES))}.")
    table = TABLES[name]
    chosen = [row for row in table.rows if fnmatch.fnmatchcase(row.key, rows)]
    if not chosen:
        raise RequestError(f"--rows {rows!r} matches none: see fpgm reproduce {name} --list.")
    settings: dict[str, Any] = {"set": sorted(change or [])}
    if scale == "quick":
        settings = {"steps": steps, "epochs": epochs, "images": images, "test": test,
                    "data": data, "mean": mean, "std": std}  # fmt: skip
    results = Results(out, table, scale, settings)
    if list_:
        _list(table, out, json)
        return
    notes: list[str] = []
    with common.LayerBar() as bar:
        quick = Quick(
            weights,
            lambda: _open(data, test, mean, std),
            Effort(steps=steps, epochs=epochs, images=images),
            bar.show,
        )
        for seed in range(seeds):
            for row in chosen:
                if results.made(row, seed) is not None:
                    continue
                bar.show(row.key, 0, 1)
                try:
                    if scale == "quick" or name == "table5":  # times need no schedule
                        made = quick.make(name, row, seed)
                    else:
                        made = full.make(row, seed, results.folder, weights, change or [])
                except FpgmError as error:
                    notes.append(f"{row.key}, seed {seed}, failed: {error}")
                    continue
                if made is None:
                    notes.append(f"{row.key} is missing: {_why(scale, name, weights)}.")
                elif os.environ.get("RANK", "0") == "0":
                    results.keep(row, seed, made, context.obj)
    if os.environ.get("RANK", "0") != "0":
        return  # the first process speaks for all
    files = results.write()
    header, lines = results.shown()
    if json:
        common.show_json(
            {"header": header, "rows": lines, "notes": notes, "files": [str(f) for f in files]}
        )
        return
    common.show_table(header, lines, left=len(table.labels))
    for note in notes:
        typer.echo(f"\n{note}")
    typer.echo(f"\nWritten to {out}: {', '.join(file.name for file in files)}")


def _why(scale: str, name: str, weights: Path) -> str:
    if scale == "full":
        return "the paper took it from another one, and there is no recipe; see fpgm compare"
    if name == "table2":
        return "ImageNet takes days on two cores; --scale full"
    return f"{weights} has no trained weights of this network"


def _open(data: str, test: int, mean: str | None, std: str | None) -> Data:
    """Pictures as quick rows take them."""
    look, learn = (pic.open_pictures(data, mean, std, 32, augment=own) for own in (False, True))

    def accuracy(net: nn.Module) -> float:
        share = look.accuracy(net, test)
        assert share is not None
        return share

    return Data(look, lambda seed: pic.Epochs(learn.sets, seed), accuracy)


def _list(table: Table, out: Path, json: bool) -> None:
    found = [(row, full.command(table, row, out), full.hours(row)) for row in table.rows]
    if json:
        common.show_json(
            [
                {"row": row.key, "labels": row.labels, "printed": dict(row.printed),
                 "command": command, "gpu_hours": hours}
                for row, command, hours in found
            ]
        )  # fmt: skip
        return
    common.show_table(
        ("row", *table.labels, "at full scale", "GPU hours"),
        [
            (row.key, *row.labels, command or "no recipe: fpgm compare",
             "" if hours is None else f"{hours:.1f}")
            for row, command, hours in found
        ],
        left=2 + len(table.labels),
    )  # fmt: skip


def _draw(
    name: str,
    scale: str,
    out: Path,
    weights: Path,
    data: tuple[str, str | None, str | None],
    json: bool,
) -> None:
    try:
        from fpgm.reproduce import drawn
    except ModuleNotFoundError as error:
        raise RequestError(f'{error.name} is not installed: pip install "fpgm[report]"') from None
    out.mkdir(parents=True, exist_ok=True)
    if name == "fig4":
        files = drawn.figure4(Results(out, TABLES["ablations"], scale), out, DRAWN)
    else:
        file = weights / "cifar10_resnet56.safetensors"
        if not file.exists():
            raise RequestError(f"{file} is not there: name its folder with --weights.")
        model = load_weights(common.build("resnet56", None), file).eval()
        if name == "fig3":
            files = drawn.figure3(model, torch.zeros(1, 3, 32, 32), out, DRAWN)
        else:
            sets = pic.open_pictures(*data, 32).sets
            pictures = (batch.images for batch in sets.test.epoch(0))
            files = drawn.figure5(model, pictures, out, DRAWN)
    if json:
        common.show_json({"files": [str(file) for file in files]})
    else:
        typer.echo(f"Written to {out}: {', '.join(file.name for file in files)}")
