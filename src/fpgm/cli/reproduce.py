"""`fpgm reproduce`: reproduce the paper's tables and figures, at full or at quick scale."""

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
from fpgm.cli import _data_options as data_opts
from fpgm.cli.train import TrainingBar
from fpgm.data.loaders import Epochs
from fpgm.errors import BusyError, FpgmError, RequestError
from fpgm.models.registry import default_shape
from fpgm.paper.tables import TABLES, PaperTable, RowResult, RowStore, TableRow, processes
from fpgm.paper.tables import full_scale as full
from fpgm.paper.tables import render as page
from fpgm.paper.tables.paper_tables import BASELINES, TABLE5, baseline_row
from fpgm.paper.tables.quick_scale import (
    IMAGE_SETTINGS,
    VGG_WEIGHTS,
    QuickBudget,
    QuickData,
    QuickScale,
)
from fpgm.paper.tables.row_files import WEIGHTS
from fpgm.paper.tables.trained_weights import SUFFIXES, find_weights, weights_digest, weights_name
from fpgm.utils import distributed
from fpgm.utils.text import format_shape, shorten
from fpgm.workflow.original_model import build_model

FIGURES = ("fig3", "fig4", "fig5")
SCALES = ("quick", "full")
FIGURE_FORMAT = "svg"
CIFAR10 = "cifar10"
SHAPE = (3, 32, 32)
"""Shape of the images that the networks of quick rows take."""
SPENT = ("steps", "epochs", "images")
"""Fields of `QuickBudget` that are options of the command."""
TEST = 10_000
TIMED = QuickBudget(batch=64, backend="cuda", seconds=20.0)
"""Latency as in the paper: batches of 64 images on one GPU."""


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of the command."""

    scale: str
    out: Path
    weights: Path
    data: str
    mean: str | None
    std: str | None
    test: int
    budget: QuickBudget
    changes: tuple[str, ...]

    def recipes(self) -> list[str]:
        """List the options that change recipes."""
        normalization = [("mean", self.mean), ("std", self.std)]
        changes = [f"data.{name}=[{value}]" for name, value in normalization if value is not None]
        root = [f"data.root={self.data}"] if self.data != CIFAR10 else []
        return [*changes, *root, *self.changes]


def reproduce(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="TABLE|FIGURE", help=", ".join((*TABLES, *FIGURES)))
    ],
    scale: Annotated[str, typer.Option(help="quick, or full (the paper's schedule).")] = "quick",
    rows: Annotated[
        str,
        typer.Option(
            metavar="PATTERN", help="Run only rows with a matching key, such as resnet20-*."
        ),
    ] = "*",
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Run seeds 0 to N-1.")] = 1,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Store rows in this folder.")] = Path(
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
        str,
        typer.Option(
            metavar="NAME|DIR", help="A data set as in fpgm prune, or the folder of ImageNet."
        ),
    ] = CIFAR10,
    steps: Annotated[
        int, typer.Option(min=1, help="Train a quick row for this many steps.")
    ] = QuickBudget.steps,
    epochs: Annotated[
        int, typer.Option(min=1, help="Train a quick row from scratch for this many epochs.")
    ] = QuickBudget.epochs,
    images: data_opts.Images = QuickBudget.images,
    test: data_opts.RequiredTest = TEST,
    mean: data_opts.Mean = None,
    std: data_opts.Std = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Replace a value of a full recipe."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List rows, their commands and their GPU hours.")
    ] = False,
    json: common.AsJson = False,
) -> None:
    """Reproduce rows of the paper's tables and compare them with the paper."""
    if scale not in SCALES:
        raise RequestError(f"--scale is {scale!r}: give quick or full.")
    if test < 1 or images < 1:
        raise RequestError("--test and --images must be at least 1.")
    if (mean is None) != (std is None):
        raise RequestError("--mean and --std go together: give both or neither.")
    budget = QuickBudget(steps=steps, epochs=epochs, images=images)
    options = ReproduceOptions(
        scale, out, weights, data, mean, std, test, budget, tuple(change or [])
    )
    _check(options)
    if name in FIGURES:
        if list_:
            raise RequestError(f"{name} is a figure and has no rows to list.")
        _draw(name, options, json)
        return
    if name not in TABLES:
        raise RequestError(
            f"Unknown table or figure {name!r}: give one of {', '.join((*TABLES, *FIGURES))}."
        )
    table = TABLES[name]
    chosen = [row for row in table.rows if fnmatch.fnmatchcase(row.key, rows)]
    if not chosen:
        raise RequestError(f"--rows {rows!r} matches no row: see fpgm reproduce {name} --list.")
    if list_:
        _list(table, chosen, out, json)
        return
    if scale == "quick":
        used = {key for row in chosen for key in QuickScale.used_settings(name, row)}
        idle = [key for key in _changed_options(options) if key not in used]
        if idle and any(not row.imagenet or table is TABLE5 for row in chosen):
            raise RequestError(f"--{idle[0]} has no effect on {name}: leave it out.")
    _tables(table, chosen, seeds, options, context.obj, json)


def _changed_options(options: ReproduceOptions) -> list[str]:
    """List the options of quick rows that differ from their defaults."""
    usual = {**{key: getattr(QuickBudget, key) for key in SPENT}, "test": TEST, "data": CIFAR10,
             "mean": None, "std": None}  # fmt: skip
    return [key for key, value in usual.items() if _option_value(options, key) != value]


def _option_value(options: ReproduceOptions, key: str) -> Any:
    return getattr(options.budget if key in SPENT else options, key)


def _check(options: ReproduceOptions) -> None:
    """Reject options that have no effect at this scale, instead of ignoring them."""
    if options.scale == "quick" and options.changes:
        raise RequestError("--set changes recipes, which only --scale full uses.")
    if options.scale == "full" and (options.budget != QuickBudget() or options.test != TEST):
        raise RequestError(
            "--steps, --epochs, --images and --test are for --scale quick: change a recipe with "
            "--set, such as --set train.epochs=3."
        )
    if options.out.exists() and not options.out.is_dir():
        raise RequestError(f"{options.out} is a file: --out must be a folder.")
    if options.weights.suffix in SUFFIXES and not options.weights.exists():
        raise RequestError(f"--weights {options.weights} does not exist.")
    if any(change.startswith("model.weights") for change in options.changes):
        raise RequestError("--set model.weights has no effect here: pass --weights.")


def _tables(
    table: PaperTable,
    chosen: Sequence[TableRow],
    seeds: int,
    options: ReproduceOptions,
    command: str,
    json: bool,
) -> None:
    """Compute missing rows, write the table and show it.

    Args:
        table: The table.
        chosen: Those of its rows to compute.
        seeds: How many seeds of each row.
        options: The other options of the command.
        command: The command line, which is stored with the results.
        json: Print JSON instead of a table.
    """
    one_process = options.scale == "quick" or table is TABLE5  # latency needs no training
    if one_process and distributed.world_size() > 1:
        raise RequestError(f"{table.name} runs in one process here: start it without a launcher.")
    if options.scale == "full" and table is TABLE5 and not torch.cuda.is_available():
        raise RequestError("table5 at full scale needs a CUDA device, and this machine has none.")
    with common.explain_missing_extra("train", "fpgm reproduce"):
        maker = _QuickRows(table, options) if one_process else _FullRows(options, chosen)
        results = RowStore(options.out, table, options.scale, maker.settings)
        processes.run_on_first(results.check)
        try:
            notes, failed = _fill(results, chosen, seeds, maker, command)
            processes.destroy_processes()
        except KeyboardInterrupt:
            if distributed.is_main_process():
                typer.echo("fpgm: stopped; run the same command to continue.", err=True)
            raise typer.Exit(130) from None
    if distributed.is_main_process():  # only one process prints
        files = page.write_table(results, lambda row: full.row_command(table, row, options.out))
        _show(results, chosen, notes, files, json)
    if failed:
        raise typer.Exit(2)


class _QuickRows:
    """Computes rows in one process: all rows at quick scale, and latency at full scale."""

    def __init__(self, table: PaperTable, options: ReproduceOptions) -> None:
        self._spent = {
            key: _option_value(options, key) for key in (*SPENT, "test", *IMAGE_SETTINGS)
        }
        budget = options.budget
        if options.scale == "full":
            budget, self._spent = TIMED, {}
        self._table, self._bar = table, common.LayerBar()
        # The name contains a hash of the options that VGG-16 is trained with.
        given = {key: self._spent.get(key) for key in ("epochs", *IMAGE_SETTINGS)}
        mark = hashlib.sha256(jsonlib.dumps(given).encode()).hexdigest()[:10]
        kept = options.out / VGG_WEIGHTS.replace(".", f"-{mark}.")
        self._rows = QuickScale(
            options.weights,
            lambda: _open(options.data, options.test, options.mean, options.std),
            budget,
            self._bar.show,
            kept,
        )
        self._weights = options.weights

    def settings(self, row: TableRow, seed: int) -> dict[str, Any]:
        name = BASELINES.name if row in BASELINES.rows else self._table.name
        used = {
            key: self._spent[key]
            for key in QuickScale.used_settings(name, row)
            if key in self._spent
        }
        return {**used, WEIGHTS: weights_digest(self._rows.start_weights(name, row))}

    def make(self, table: PaperTable, row: TableRow, seed: int) -> RowResult | None:
        with self._bar:
            self._bar.show(row.key, 0, 1)
            return self._rows.run(table.name, row, seed)

    def missing_reason(self, row: TableRow) -> str:
        if row.imagenet:
            return "ImageNet has no quick scale: use --scale full"
        file = self._weights / weights_name(row)
        return f"there are no trained weights {file}: give their folder with --weights"


class _FullRows:
    """Computes rows by training with their recipes, in one process or several."""

    def __init__(self, options: ReproduceOptions, chosen: Sequence[TableRow]) -> None:
        self._rows = full.FullScale(options.out, options.weights, options.recipes())
        self._rows.check(chosen)

    def settings(self, row: TableRow, seed: int) -> dict[str, Any]:
        return self._rows.settings(row, seed)

    def has_start_weights(self, row: TableRow, seed: int) -> bool:
        """Check whether there are weights to start from; all processes get the same result."""
        return processes.run_on_first(lambda: self._rows.start_weights(row, seed) is not None)

    def make(self, table: PaperTable, row: TableRow, seed: int) -> RowResult:
        with TrainingBar() as bars:
            return self._rows.run(table, row, seed, bars, bars.show_phase)


def _fill(
    results: RowStore,
    chosen: Sequence[TableRow],
    seeds: int,
    maker: _QuickRows | _FullRows,
    command: str,
) -> tuple[list[str], bool]:
    """Compute missing rows; return notes about rows that are still missing, and if any failed."""
    notes: list[str] = []
    missing: dict[str, dict[str, None]] = {}  # keys of rows by reason, in order
    taken: list[tuple[RowStore, TableRow, int]] = []
    busy: list[tuple[RowStore, TableRow, int]] = []
    failed = False
    for place, row, seed in _rows_to_compute(results, chosen, seeds):
        claim = place.claim(row, seed) if distributed.is_main_process() else nullcontext(True)
        with claim as free:
            base = (
                (BASELINES.name, baseline_row(row.network).key, seed) if row.needs_weights else None
            )
            waits = base in [
                (store.table.name, other.key, s) for store, other, s in (*taken, *busy)
            ]
            there, free = processes.run_on_first(partial(_state, place, row, seed, free))
            if there:
                continue
            if waits and isinstance(maker, _FullRows) and not maker.has_start_weights(row, seed):
                notes.append(f"{row.key}, seed {seed}, waits for its baseline, which another "
                             "process is training.")  # fmt: skip
                continue
            if not free:
                taken.append((place, row, seed))
                continue
            try:
                result = maker.make(place.table, row, seed)
            except BusyError:  # it computes another row that needs the same training
                busy.append((place, row, seed))
                notes.append(f"{row.key}, seed {seed}, waits for its training in another process: "
                             "run the same command again afterwards.")  # fmt: skip
                continue
            except FpgmError as error:
                if distributed.world_size() > 1:
                    raise  # other processes may be waiting for this one: end them all
                notes.append(f"{row.key}, seed {seed}, failed: {error}")
                failed = True
                continue
            if result is None:
                assert isinstance(maker, _QuickRows)
                missing.setdefault(maker.missing_reason(row), {})[row.key] = None
                failed = failed or not row.imagenet  # weights could have been given
            elif distributed.is_main_process():
                place.save(row, seed, result, command)
    for place, row, seed in taken:
        if distributed.is_main_process() and place.load(row, seed) is None:
            notes.append(f"{row.key}, seed {seed}, is being computed by another process.")
    notes += [f"Missing: {shorten(list(keys))}: {why}." for why, keys in missing.items()]
    return notes, failed


def _rows_to_compute(
    results: RowStore, chosen: Sequence[TableRow], seeds: int
) -> Iterator[tuple[RowStore, TableRow, int]]:
    """Yield the rows, and for rows from scratch at full scale the baseline of their network.

    The baseline comes after its row, or before it if the row starts from the baseline's weights.
    """
    whole = results.baselines if results.scale == "full" else None
    for seed in range(seeds):
        for row in chosen:
            needed = [(results, row, seed)]
            if whole is not None and row.start == "scratch":
                needed.insert(
                    0 if row.needs_weights else 1, (whole, baseline_row(row.network), seed)
                )
            yield from needed


def _state(place: RowStore, row: TableRow, seed: int, free: bool) -> tuple[bool, bool]:
    """Return whether a row has a result, and whether it may be computed here."""
    return place.load(row, seed) is not None, free


def _show(
    results: RowStore,
    chosen: Sequence[TableRow],
    notes: Sequence[str],
    files: Sequence[Path],
    json: bool,
) -> None:
    header, lines = page.table_cells(results, chosen)
    if json:
        metrics = [page.row_to_dict(results, row) for row in chosen]
        common.show_json({"header": header, "rows": lines, "figures": metrics, "notes": notes,
                          "files": [str(file) for file in files]})  # fmt: skip
        return
    common.show_table(header, lines, left=len(results.table.labels))
    for note in notes if results.scale == "full" else [*notes, page.QUICK_NOTE]:
        typer.echo(f"\n{note}")
    typer.echo(f"\nWritten to {files[0].parent}: {', '.join(file.name for file in files)}")


def _open(data: str, test: int, mean: str | None, std: str | None) -> QuickData:
    """Open the data for quick rows."""
    calibration, training = (
        data_opts.open_images(data, mean, std, SHAPE[-1], augment=augmented)
        for augmented in (False, True)
    )
    if tuple(calibration.sets.shape) != SHAPE:
        have, need = format_shape(calibration.sets.shape), format_shape(SHAPE)
        raise RequestError(f"--data {data} has images of {have}, but these networks take {need}.")

    def accuracy(net: nn.Module) -> float:
        share = calibration.accuracy(net, test)
        assert share is not None
        return share

    return QuickData(calibration, lambda seed: Epochs(training.sets, seed), accuracy)


def _list(table: PaperTable, chosen: Sequence[TableRow], out: Path, json: bool) -> None:
    listed = [
        (row, full.row_command(table, row, out), full.gpu_hours(table, row)) for row in chosen
    ]
    if json:
        common.show_json(
            [
                {"row": row.key, "labels": row.labels, "printed": dict(row.paper),
                 "printed_spread": dict(row.spread), "command": command, "gpu_hours": hours,
                 "quoted": row.cited}
                for row, command, hours in listed
            ]
        )  # fmt: skip
        return
    common.show_table(
        ("row", *table.labels, "at full scale", "GPU hours"),
        [
            (row.key, *row.labels, command, f"{hours:.1f}")
            for row, command, hours in listed
        ],
        left=2 + len(table.labels),
    )  # fmt: skip
    if all(row.imagenet for row in chosen) and table is not TABLE5:
        typer.echo("\nThese rows have no quick scale: ImageNet would take days on two cores.")
    else:
        trained = table.name in ("table1", BASELINES.name)
        typer.echo(f"\nAt quick scale: fpgm reproduce {table.name} --rows ROW"
                   f"{' --weights DIR' if trained else ''}")  # fmt: skip
    if any(column.before is not None for column in table.accuracies):
        typer.echo(
            "\nA row from scratch also trains its unpruned baseline, once per network and seed: "
            f"fpgm reproduce {BASELINES.name} --list"
        )


def _draw(name: str, options: ReproduceOptions, json: bool) -> None:
    with common.explain_missing_extra("report", "A figure of the paper"):
        from fpgm.paper.tables import figures as paper_figures

        missing: list[str] = []
        files: list[Path] = []
        if name == "fig4":
            files = paper_figures.figure4(RowStore(options.out, TABLES["ablations"], options.scale),
                                  options.out, FIGURE_FORMAT)  # fmt: skip
        networks = {
            "fig3": paper_figures.NORM_NETWORKS[options.scale],
            "fig5": paper_figures.MAP_NETWORKS[options.scale][:1],
        }
        for network in networks.get(name, ()):
            row = baseline_row(network)
            file = _weights_of(row, options)
            if file is None:
                weights = options.weights / weights_name(row)
                missing.append(f"{row.labels[0]} is missing: there are no trained weights "
                               f"{weights}.")  # fmt: skip
                continue
            model = build_model(network, file)
            shape = default_shape(network)
            options.out.mkdir(parents=True, exist_ok=True)
            if name == "fig3":
                files += paper_figures.figure3(
                    model, torch.zeros(shape), options.out, row.network_name, FIGURE_FORMAT
                )
            else:
                if row.imagenet and options.data == CIFAR10:
                    raise RequestError(
                        "fig5 at full scale needs images of ImageNet: give the folder that "
                        "contains train and val with --data."
                    )
                sets = data_opts.open_images(
                    options.data, options.mean, options.std, shape[-1]
                ).sets
                images = (batch.images for batch in sets.test.epoch(0))
                rate = paper_figures.MAP_NETWORKS[options.scale][1]
                files += paper_figures.figure5(
                    model, images, options.out, row.network_name, FIGURE_FORMAT, rate
                )
    if not files:
        raise RequestError(f"{missing[0]} Give their folder with --weights.")
    if json:
        common.show_json({"files": [str(file) for file in files], "notes": missing})
        return
    typer.echo(f"Written to {options.out}: {', '.join(file.name for file in files)}")
    for note in missing:
        typer.echo(note)


def _weights_of(row: TableRow, options: ReproduceOptions) -> Path | None:
    """Find trained weights: the user's, or those of a baseline in the same folder."""
    if options.scale == "quick":
        return find_weights(options.weights, row)
    with common.explain_missing_extra("train", "fpgm reproduce"):
        return full.FullScale(options.out, options.weights, options.recipes()).start_weights(row, 0)
