"""`fpgm reproduce`: the paper's tables and figures by name, in full or on two cores."""

from __future__ import annotations

import fnmatch
import hashlib
import json as jsonlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from fpgm.cli import _common as common
from fpgm.cli import _data_options as pic
from fpgm.cli.train import Bars
from fpgm.data.loaders import Epochs
from fpgm.errors import BusyError, FpgmError, RequestError
from fpgm.models.registry import default_shape
from fpgm.paper.tables import TABLES, Made, Results, Row, Table, processes
from fpgm.paper.tables import full_scale as full
from fpgm.paper.tables import render as page
from fpgm.paper.tables.paper_tables import BASELINES, TABLE5, baseline_of
from fpgm.paper.tables.quick_scale import PICTURES, VGG_WEIGHTS, Data, Effort, Quick
from fpgm.paper.tables.row_files import WEIGHTS
from fpgm.paper.tables.trained_weights import ENDINGS, digest, find_weights, weights_name
from fpgm.utils import distributed as launch
from fpgm.utils.text import shorten, size

FIGURES = ("fig3", "fig4", "fig5")
SCALES = ("quick", "full")
DRAWN = "svg"
CIFAR10 = "cifar10"
SHAPE = (3, 32, 32)
"""Of its pictures, which quick rows' networks take."""
SPENT = ("steps", "epochs", "images")
"""What of an effort the command can change."""
TEST = 10_000
TIMED = Effort(batch=64, backend="cuda", seconds=20.0)
"""How the paper takes its times: 64 pictures at once on one GPU."""


@dataclass(frozen=True)
class Asked:
    """What the command was given, besides a name."""

    scale: str
    out: Path
    weights: Path
    data: str
    mean: str | None
    std: str | None
    test: int
    effort: Effort
    changes: tuple[str, ...]

    def recipes(self) -> list[str]:
        """What of it replaces values of recipes."""
        look = [("mean", self.mean), ("std", self.std)]
        found = [f"data.{name}=[{value}]" for name, value in look if value is not None]
        root = [f"data.root={self.data}"] if self.data != CIFAR10 else []
        return [*found, *root, *self.changes]


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
        typer.Option(
            metavar="DIR|FILE",
            envvar="FPGM_WEIGHTS",
            help="Trained weights: a folder with cifar10_resnet56.safetensors, … or one file.",
        ),
    ] = Path("weights"),
    data: Annotated[
        str, typer.Option(metavar="NAME|DIR", help="As for fpgm prune; ImageNet's folder.")
    ] = CIFAR10,
    steps: Annotated[int, typer.Option(min=1, help="Of training a quick row.")] = Effort.steps,
    epochs: Annotated[int, typer.Option(min=1, help="From scratch, quick.")] = Effort.epochs,
    images: pic.Images = Effort.images,
    test: pic.Counted = TEST,
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
    if test < 1 or images < 1:
        raise RequestError("--test and --images are whole numbers from 1 up.")
    if (mean is None) != (std is None):
        raise RequestError("--mean and --std go together: give both or neither.")
    effort = Effort(steps=steps, epochs=epochs, images=images)
    asked = Asked(scale, out, weights, data, mean, std, test, effort, tuple(change or []))
    _check(asked)
    if name in FIGURES:
        if list_:
            raise RequestError(f"{name} is a figure and has no rows to list.")
        _draw(name, asked, json)
        return
    if name not in TABLES:
        raise RequestError(f"There is no {name!r}: give one of {', '.join((*TABLES, *FIGURES))}.")
    table = TABLES[name]
    chosen = [row for row in table.rows if fnmatch.fnmatchcase(row.key, rows)]
    if not chosen:
        raise RequestError(f"--rows {rows!r} matches none: see fpgm reproduce {name} --list.")
    if list_:
        _list(table, chosen, out, json)
        return
    if scale == "quick":
        used = {key for row in chosen for key in Quick.uses(name, row)}
        idle = [key for key in _changed(asked) if key not in used]
        if idle and any(not row.imagenet or table is TABLE5 for row in chosen):
            raise RequestError(f"--{idle[0]} changes nothing in {name}: leave it out.")
    _tables(table, chosen, seeds, asked, context.obj, json)


def _changed(asked: Asked) -> list[str]:
    """Options of quick rows that are not as they are by themselves."""
    usual = {**{key: getattr(Effort, key) for key in SPENT}, "test": TEST, "data": CIFAR10,
             "mean": None, "std": None}  # fmt: skip
    return [key for key, own in usual.items() if _given(asked, key) != own]


def _given(asked: Asked, key: str) -> Any:
    return getattr(asked.effort if key in SPENT else asked, key)


def _check(asked: Asked) -> None:
    """Refuse what the scale has no use for, rather than pass over it."""
    if asked.scale == "quick" and asked.changes:
        raise RequestError("--set changes recipes, which quick rows do not follow: --scale full.")
    if asked.scale == "full" and (asked.effort != Effort() or asked.test != TEST):
        raise RequestError(
            "--steps, --epochs, --images and --test are for quick rows: --set train.epochs=3."
        )
    if asked.out.exists() and not asked.out.is_dir():
        raise RequestError(f"{asked.out} is a file: --out names a folder.")
    if asked.weights.suffix in ENDINGS and not asked.weights.exists():
        raise RequestError(f"--weights {asked.weights} does not exist.")
    if any(own.startswith("model.weights") for own in asked.changes):
        raise RequestError("--set model.weights is for fpgm train: give --weights here.")


def _tables(
    table: Table, chosen: Sequence[Row], seeds: int, asked: Asked, command: str, json: bool
) -> None:
    """Make what is not there, write and show."""
    alone = asked.scale == "quick" or table is TABLE5  # times need no schedule
    if alone and launch.count() > 1:
        raise RequestError(f"{table.name} is made by one process here: leave the launcher out.")
    if asked.scale == "full" and table is TABLE5 and not torch.cuda.is_available():
        raise RequestError(
            "table5 at full scale is timed on a CUDA device, and there is none here."
        )
    with common.extra("train"):
        maker = _Quick(table, asked) if alone else _Full(asked, chosen)
        results = Results(asked.out, table, asked.scale, maker.settings)
        processes.first(results.check)
        try:
            notes, failed = _fill(results, chosen, seeds, maker, command)
            processes.leave()
        except KeyboardInterrupt:
            if launch.is_first():
                typer.echo("fpgm: stopped; the same command goes on.", err=True)
            raise typer.Exit(130) from None
    if launch.is_first():  # it speaks for all
        files = page.written(results, lambda row: full.command(table, row, asked.out))
        _show(results, chosen, notes, files, json)
    if failed:
        raise typer.Exit(2)


class _Quick:
    """Rows made by one process: at quick scale, and all times."""

    def __init__(self, table: Table, asked: Asked) -> None:
        self._spent = {key: _given(asked, key) for key in (*SPENT, "test", *PICTURES)}
        effort = asked.effort
        if asked.scale == "full":
            effort, self._spent = TIMED, {}
        self._table, self._bar = table, common.LayerBar()
        # What a VGG-16 is trained with is in its name: other options train another one.
        given = {key: self._spent.get(key) for key in ("epochs", *PICTURES)}
        mark = hashlib.sha256(jsonlib.dumps(given).encode()).hexdigest()[:10]
        kept = asked.out / VGG_WEIGHTS.replace(".", f"-{mark}.")
        self._rows = Quick(
            asked.weights,
            lambda: _open(asked.data, asked.test, asked.mean, asked.std),
            effort,
            self._bar.show,
            kept,
        )
        self._weights = asked.weights

    def settings(self, row: Row, seed: int) -> dict[str, Any]:
        name = BASELINES.name if row in BASELINES.rows else self._table.name
        used = {key: self._spent[key] for key in Quick.uses(name, row) if key in self._spent}
        return {**used, WEIGHTS: digest(self._rows.start(name, row))}

    def make(self, table: Table, row: Row, seed: int) -> Made | None:
        with self._bar:
            self._bar.show(row.key, 0, 1)
            return self._rows.make(table.name, row, seed)

    def why(self, row: Row) -> str:
        if row.imagenet:
            return "ImageNet takes days on two cores; --scale full"
        return f"{self._weights} has no {weights_name(row)}: name its folder with --weights"


class _Full:
    """Rows made by their recipes, by one process or many."""

    def __init__(self, asked: Asked, chosen: Sequence[Row]) -> None:
        self._rows = full.Full(asked.out, asked.weights, asked.recipes())
        self._rows.check(chosen)

    def settings(self, row: Row, seed: int) -> dict[str, Any]:
        return self._rows.settings(row, seed)

    def starts(self, row: Row, seed: int) -> bool:
        """Whether there are weights to start from, for every process."""
        return processes.first(lambda: self._rows.start(row, seed) is not None)

    def make(self, table: Table, row: Row, seed: int) -> Made:
        with Bars() as bars:
            return self._rows.make(table, row, seed, bars, bars.before)


def _fill(
    results: Results, chosen: Sequence[Row], seeds: int, maker: _Quick | _Full, command: str
) -> tuple[list[str], bool]:
    """Make the rows that are not there; what is to be said of others, and whether any failed."""
    notes: list[str] = []
    missing: dict[str, dict[str, None]] = {}  # rows by why, in order, each once
    taken: list[tuple[Results, Row, int]] = []
    busy: list[tuple[Results, Row, int]] = []
    failed = False
    for place, row, seed in _needed(results, chosen, seeds):
        claim = place.claimed(row, seed) if launch.is_first() else nullcontext(True)
        with claim as free:
            base = (BASELINES.name, baseline_of(row.network).key, seed) if row.begins else None
            waits = base in [(own.table.name, other.key, s) for own, other, s in (*taken, *busy)]
            there, free = processes.first(partial(_state, place, row, seed, free))
            if there:
                continue
            if waits and isinstance(maker, _Full) and not maker.starts(row, seed):
                notes.append(f"{row.key}, seed {seed}, waits for its baseline: another process is "
                             "making it.")  # fmt: skip
                continue
            if not free:
                taken.append((place, row, seed))
                continue
            try:
                made = maker.make(place.table, row, seed)
            except BusyError:  # it makes another row that has the same training
                busy.append((place, row, seed))
                notes.append(f"{row.key}, seed {seed}, waits for its training: another process is "
                             "at it; the same command goes on afterwards.")  # fmt: skip
                continue
            except FpgmError as error:
                if launch.count() > 1:
                    raise  # others may be waiting for this one in their training: end them all
                notes.append(f"{row.key}, seed {seed}, failed: {error}")
                failed = True
                continue
            if made is None:
                assert isinstance(maker, _Quick)
                missing.setdefault(maker.why(row), {})[row.key] = None
                failed = failed or not row.imagenet  # weights could have been given
            elif launch.is_first():
                place.keep(row, seed, made, command)
    for place, row, seed in taken:
        if launch.is_first() and place.made(row, seed) is None:
            notes.append(f"{row.key}, seed {seed}, is being made by another process.")
    notes += [f"Missing: {shorten(list(keys))}: {why}." for why, keys in missing.items()]
    return notes, failed


def _needed(
    results: Results, chosen: Sequence[Row], seeds: int
) -> Iterator[tuple[Results, Row, int]]:
    """The rows, and with those from scratch at full scale the network they are compared with.

    It comes behind a row, which is what was asked for, or before one that may be chosen by it.
    """
    whole = results.baselines if results.scale == "full" else None
    for seed in range(seeds):
        for row in chosen:
            needed = [(results, row, seed)]
            if whole is not None and row.start == "scratch":
                needed.insert(0 if row.begins else 1, (whole, baseline_of(row.network), seed))
            yield from needed


def _state(place: Results, row: Row, seed: int, free: bool) -> tuple[bool, bool]:
    """Whether a row is there, and if not, whether it may be made here."""
    return place.made(row, seed) is not None, free


def _show(
    results: Results, chosen: Sequence[Row], notes: Sequence[str], files: Sequence[Path], json: bool
) -> None:
    header, lines = page.shown(results, chosen)
    if json:
        figures = [page.told(results, row) for row in chosen]
        common.show_json({"header": header, "rows": lines, "figures": figures, "notes": notes,
                          "files": [str(file) for file in files]})  # fmt: skip
        return
    common.show_table(header, lines, left=len(results.table.labels))
    for note in notes if results.scale == "full" else [*notes, page.QUICK]:
        typer.echo(f"\n{note}")
    typer.echo(f"\nWritten to {files[0].parent}: {', '.join(file.name for file in files)}")


def _open(data: str, test: int, mean: str | None, std: str | None) -> Data:
    """Pictures as quick rows take them."""
    look, learn = (
        pic.open_pictures(data, mean, std, SHAPE[-1], augment=own) for own in (False, True)
    )
    if tuple(look.sets.shape) != SHAPE:
        raise RequestError(f"--data {data} gives pictures of {size(look.sets.shape)}: these "
                           f"networks take {size(SHAPE)}.")  # fmt: skip

    def accuracy(net: nn.Module) -> float:
        share = look.accuracy(net, test)
        assert share is not None
        return share

    return Data(look, lambda seed: Epochs(learn.sets, seed), accuracy)


def _list(table: Table, chosen: Sequence[Row], out: Path, json: bool) -> None:
    found = [(row, full.command(table, row, out), full.hours(table, row)) for row in chosen]
    if json:
        common.show_json(
            [
                {"row": row.key, "labels": row.labels, "printed": dict(row.printed),
                 "printed_spread": dict(row.spread), "command": command, "gpu_hours": hours,
                 "quoted": row.quoted}
                for row, command, hours in found
            ]
        )  # fmt: skip
        return
    common.show_table(
        ("row", *table.labels, "at full scale", "GPU hours"),
        [
            (row.key, *row.labels, command, f"{hours:.1f}")
            for row, command, hours in found
        ],
        left=2 + len(table.labels),
    )  # fmt: skip
    if all(row.imagenet for row in chosen) and table is not TABLE5:
        typer.echo("\nThere is no quick scale of these: ImageNet takes days on two cores.")
    else:
        trained = table.name in ("table1", BASELINES.name)
        typer.echo(f"\nAt quick scale: fpgm reproduce {table.name} --rows ROW"
                   f"{' --weights DIR' if trained else ''}")  # fmt: skip
    if any(own.before is not None for own in table.accuracies):
        typer.echo(
            "\nA row from scratch also trains the network it is compared with, once a seed for "
            f"all of them: fpgm reproduce {BASELINES.name} --list"
        )


def _draw(name: str, asked: Asked, json: bool) -> None:
    with common.extra("report"):
        from fpgm.paper.tables import figures as drawn

        missing: list[str] = []
        files: list[Path] = []
        if name == "fig4":
            files = drawn.figure4(Results(asked.out, TABLES["ablations"], asked.scale),
                                  asked.out, DRAWN)  # fmt: skip
        wanted = {"fig3": drawn.NORMS[asked.scale], "fig5": drawn.MAPS[asked.scale][:1]}
        for network in wanted.get(name, ()):
            row = baseline_of(network)
            file = _weights_of(row, asked)
            if file is None:
                missing.append(f"{row.labels[0]} is missing: {asked.weights} has no "
                               f"{weights_name(row)}.")  # fmt: skip
                continue
            model = common.build(network, file)
            shape = default_shape(network)
            asked.out.mkdir(parents=True, exist_ok=True)
            if name == "fig3":
                files += drawn.figure3(model, torch.zeros(shape), asked.out, row.net, DRAWN)
            else:
                if row.imagenet and asked.data == CIFAR10:
                    raise RequestError(
                        "fig5 at full scale shows pictures of ImageNet: name their folder, which "
                        "holds train and val, with --data."
                    )
                sets = pic.open_pictures(asked.data, asked.mean, asked.std, shape[-1]).sets
                pictures = (batch.images for batch in sets.test.epoch(0))
                rate = drawn.MAPS[asked.scale][1]
                files += drawn.figure5(model, pictures, asked.out, row.net, DRAWN, rate)
    if not files:
        raise RequestError(f"{missing[0]} Name the folder with --weights.")
    if json:
        common.show_json({"files": [str(file) for file in files], "notes": missing})
        return
    typer.echo(f"Written to {asked.out}: {', '.join(file.name for file in files)}")
    for note in missing:
        typer.echo(note)


def _weights_of(row: Row, asked: Asked) -> Path | None:
    """Weights the user has, or those of a baseline that was made in the same folder."""
    if asked.scale == "quick":
        return find_weights(asked.weights, row)
    with common.extra("train"):
        return full.Full(asked.out, asked.weights, asked.recipes()).start(row, 0)
