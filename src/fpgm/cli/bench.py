"""`fpgm bench`: how fast a pruned model is, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from fpgm.cli import _common as common
from fpgm.cli._outcome import Outcome, next_command, show_outcome
from fpgm.errors import FileError, RequestError
from fpgm.latency.backends import BACKENDS
from fpgm.latency.benchmark import SECONDS, Bench
from fpgm.latency.benchmark import bench as measure
from fpgm.latency.layer_breakdown import LayerTime
from fpgm.utils.atomic_io import explain_write_errors, write_text
from fpgm.utils.plain_json import to_json
from fpgm.utils.run_files import BENCH, read_results
from fpgm.utils.text import escape_text, format_number
from fpgm.workflow.original_model import build_model, example_input
from fpgm.workflow.pruned_folder import load_small, read_trusted


def bench(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B …]",
            help="Folders written by `fpgm prune`, or models; the first is the baseline. A single "
            "folder is compared with its original model.",
        ),
    ],
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="RUNTIME", help=f"Time in {', '.join(BACKENDS)}; may be repeated."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Set the batch size; may be repeated.")
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Set the number of threads; may be repeated."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Measure each comparison for this long.")
    ] = SECONDS,
    input: common.Input = None,  # noqa: A002  (the option's name)
    keep: Annotated[
        bool, typer.Option("--keep", help="Also write the measurements to the last folder.")
    ] = False,
    trusted: common.Trusted = None,
    all_rows: common.All = False,
    json: common.AsJson = False,
) -> None:
    """Time models against each other in every runtime, and report the speedup."""
    if keep and not Path(models[-1]).is_dir():
        raise RequestError(f"--keep writes into a folder of fpgm prune, which {models[-1]} is not.")
    nets, shape = _read_models(models, input, trusted or ())
    with common.explain_assumed_shape(shape, input), common.LayerBar() as bar:
        result = measure(
            nets, example_input(shape),
            backends=backend, batches=batch, threads=threads, seconds=seconds, progress=bar.show,
        )  # fmt: skip
    summary = {"models": list(nets), "input": shape, **result.to_dict()}
    if keep:
        file = Path(models[-1]) / BENCH
        with explain_write_errors(file):
            write_text(file, to_json(summary) + "\n")
    if json:
        common.show_json(summary)
    else:
        folder = Path(models[-1])
        follow = next_command("bench", folder, read_results(folder)) if folder.is_dir() else {}
        _show(result, None if all_rows else common.ROWS, follow)


def _read_models(
    names: Sequence[str], given: str | None, trusted: Sequence[str]
) -> tuple[dict[str, nn.Module], tuple[int, ...]]:
    """Return the models and an input that all of them take."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise RequestError(f"{name} is named twice: give different models.")
    nets: dict[str, nn.Module] = {}
    shape: tuple[int, ...] | None = None
    for name in names:
        folder = Path(name)
        if not folder.exists() and "/" in name and ":" not in name:
            raise FileError(f"There is no folder {name}: give a folder of fpgm prune, or a model.")
        if folder.is_dir():
            results = read_trusted(folder, trusted)
            shape = shape or tuple(results["input"])
            if len(names) == 1:
                first = "original" if name != "original" else "its original"
                nets[first] = build_model(results["model"], None)
            nets[name] = load_small(folder, results).eval()
        else:
            shape = shape or common.input_shape(given, name)
            nets[name] = build_model(name, None)
    assert shape is not None
    return nets, shape if given is None else common.input_shape(given, names[0])


def _show(result: Bench, most: int | None, follow: Outcome) -> None:
    """Print the verdicts and the next command, then all times."""
    count = len(result.rows[0].figures)
    for row in result.rows:
        for own in row.figures[1:]:
            which = row.where if count == 2 else f"{row.where}, {own.model}"
            line = escape_text(f"{which}: {own.verdict}.")
            typer.secho(line, bold=row.crowd is None, fg="yellow" if row.crowd else None)
    if follow:
        show_outcome(follow)
    if count > 1 or follow:
        typer.echo("")
    common.show_table(
        ("runtime", "model", "batch", "threads", "ms", "±", "inputs/s", "faster", "file", "memory"),
        [
            (
                row.backend if place == 0 else "", f.model, str(row.batch), str(row.threads),
                format_number(1000 * f.seconds), f"{f.spread:.0%}", format_number(f.per_second),
                "" if place == 0 else "–" if row.crowd else f"{f.faster:.2f}×",
                _format_megabytes(f.file_bytes), _format_megabytes(f.memory_bytes),
            )
            for row in result.rows
            for place, f in enumerate(row.figures)
        ],
        left=2,
    )  # fmt: skip
    if result.layers:
        typer.echo("\nWhere the time goes (PyTorch):\n")
        if result.layers_crowd is not None:
            typer.secho(f"Unreliable: {result.layers_crowd}.\n", fg="yellow")
        _show_layers(result.layers, most)
    if result.skipped:
        typer.echo("")
    for name, why in result.skipped.items():
        typer.echo(f"Not measured: {name} ({why})")


def _show_layers(layers: Sequence[LayerTime], most: int | None) -> None:
    """Print the most expensive layers, and the rest in one line unless `most` is None."""
    total = sum(layer.seconds[0] for layer in layers)
    by_time = sorted(layers, key=lambda layer: -max(layer.seconds))
    shown, rest = by_time[:most], by_time[len(layers) if most is None else most :]
    rows = [
        (
            s.path or "(model)",
            s.kind,
            _format_widths(s),
            *_format_times(s),
            _format_fraction(s, total),
        )
        for s in shown
    ]
    if rest:
        more = _sum_layers(rest)
        rows.append((more.path, "", "", *_format_times(more), _format_fraction(more, total)))
    count = len(layers[0].seconds)
    names = ["ms"] if count == 1 else ["ms before", *["ms after"] * (count - 1)]
    common.show_table(("layer", "kind", "channels", *names, "share"), rows, left=3)


def _sum_layers(layers: Sequence[LayerTime]) -> LayerTime:
    """Add up layers; the sum is a bound if one of them is."""
    places = range(len(layers[0].seconds))
    seconds = tuple(sum(layer.seconds[place] for layer in layers) for place in places)
    at_most = tuple(any(layer.is_bound(place) for layer in layers) for place in places)
    return LayerTime(common.more_rows(len(layers)), "", (), seconds, at_most=at_most)


def _format_times(layer: LayerTime) -> list[str]:
    return [
        f"{'≤ ' * layer.is_bound(place)}{format_number(1000 * value)}"
        for place, value in enumerate(layer.seconds)
    ]


def _format_fraction(layer: LayerTime, total: float) -> str:
    return f"{'≤ ' * layer.is_bound(0)}{layer.seconds[0] / total:.1%}"


def _format_megabytes(count: int | None) -> str:
    return "" if count is None else f"{format_number(count / 1e6)} MB"


def _format_widths(layer: LayerTime) -> str:
    texts = [f"{w[0]} → {w[1]}" for w in dict.fromkeys(layer.widths) if w is not None]
    return ", ".join(texts)
