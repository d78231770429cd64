"""`fpgm bench`: how fast a pruned model is, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from fpgm.cli import _common as common
from fpgm.cli import _run_dir as res
from fpgm.errors import FileError, RequestError
from fpgm.latency.backends import BACKENDS
from fpgm.latency.benchmark import SECONDS, Bench
from fpgm.latency.benchmark import bench as measure
from fpgm.latency.layer_breakdown import Spent
from fpgm.utils.atomic_io import write_text, writing
from fpgm.utils.text import figure

_SHOWN = 12
"""Layers in the table of where the time goes."""


def bench(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B …]",
            help="Folders of `fpgm prune`, or models; the others are compared with the first. Of "
            "one folder alone, the pruned model with its original.",
        ),
    ],
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="RUNTIME", help=f"Some of {', '.join(BACKENDS)}; may be repeated."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Batch size; may be repeated.")
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Threads; may be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for each comparison.")] = SECONDS,
    input: common.Input = None,  # noqa: A002  (the option's name)
    keep: Annotated[
        bool, typer.Option("--keep", help="Write what was measured into the last folder, too.")
    ] = False,
    trusted: common.Trusted = None,
    json: common.AsJson = False,
) -> None:
    """Time models against each other in every runtime, in turns, and say whether pruning pays."""
    if keep and not Path(models[-1]).is_dir():
        raise RequestError(f"--keep writes into a folder of fpgm prune: {models[-1]} is none.")
    nets, shape = _read(models, input, trusted or ())
    with common.supposing(shape, input), common.LayerBar() as bar:
        found = measure(
            nets, common.example(shape),
            backends=backend, batches=batch, threads=threads, seconds=seconds, progress=bar.show,
        )  # fmt: skip
    told = {"models": list(nets), "input": shape, **found.to_dict()}
    if keep:
        file = Path(models[-1]) / res.BENCH
        with writing(file):
            write_text(file, common.to_json(told) + "\n")
    if json:
        common.show_json(told)
    else:
        _show(found)


def _read(
    names: Sequence[str], given: str | None, trusted: Sequence[str]
) -> tuple[dict[str, nn.Module], tuple[int, ...]]:
    """The models, and an input they all take."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise RequestError(f"{name} is named twice: give different models.")
    nets: dict[str, nn.Module] = {}
    shape: tuple[int, ...] | None = None
    for name in names:
        folder = Path(name)
        if not folder.exists() and "/" in name and ":" not in name:
            raise FileError(f"There is no folder {name}: give one of fpgm prune, or a model.")
        if folder.is_dir():
            told = res.read(folder, trusted)
            shape = shape or tuple(told["input"])
            if len(names) == 1:
                first = "original" if name != "original" else "its original"
                nets[first] = common.build(told["model"], None)
            nets[name] = res.small_of(folder, told).eval()
        else:
            shape = shape or common.input_shape(given, name)
            nets[name] = common.build(name, None)
    assert shape is not None
    return nets, shape if given is None else common.input_shape(given, names[0])


def _show(found: Bench) -> None:
    common.show_table(
        ("runtime", "model", "batch", "threads", "ms", "±", "inputs/s", "faster", "file", "memory"),
        [
            (
                row.backend if place == 0 else "", f.model, str(row.batch), str(row.threads),
                figure(1000 * f.seconds), f"{f.spread:.0%}", figure(f.per_second),
                "" if place == 0 else "–" if row.crowd else f"{f.faster:.2f}×",
                _megabytes(f.file_bytes), _megabytes(f.memory_bytes),
            )
            for row in found.rows
            for place, f in enumerate(row.figures)
        ],
        left=2,
    )  # fmt: skip
    count = len(found.rows[0].figures)
    if count > 1:
        typer.echo("")
        for row in found.rows:
            for own in row.figures[1:]:
                which = row.where if count == 2 else f"{row.where}, {own.model}"
                typer.echo(f"{which}: {own.verdict}.")
    if found.layers:
        typer.echo("\nWhere the time goes (PyTorch):\n")
        _show_layers(found.layers)
    for name, why in found.skipped.items():
        typer.echo(f"\nNot measured: {name} ({why})")


def _show_layers(layers: Sequence[Spent]) -> None:
    """The dearest layers, and what is left in one line."""
    whole = sum(layer.seconds[0] for layer in layers)
    dearest = sorted(layers, key=lambda layer: -max(layer.seconds))
    shown, rest = dearest[:_SHOWN], dearest[_SHOWN:]
    rows = [(s.path or "(model)", s.kind, _widths(s), *_times(s), _share(s, whole)) for s in shown]
    if rest:
        more = _together(rest)
        rows.append((more.path, "", "", *_times(more), _share(more, whole)))
    count = len(layers[0].seconds)
    names = ["ms"] if count == 1 else ["ms before", *["ms after"] * (count - 1)]
    common.show_table(("layer", "kind", "channels", *names, "share"), rows, left=3)


def _together(layers: Sequence[Spent]) -> Spent:
    """Several as one: their sum is a bound if one of them is."""
    places = range(len(layers[0].seconds))
    seconds = tuple(sum(layer.seconds[place] for layer in layers) for place in places)
    at_most = tuple(any(layer.bounds(place) for layer in layers) for place in places)
    return Spent(f"{len(layers)} more", "", (), seconds, at_most=at_most)


def _times(layer: Spent) -> list[str]:
    return [
        f"{'≤ ' * layer.bounds(place)}{figure(1000 * value)}"
        for place, value in enumerate(layer.seconds)
    ]


def _share(layer: Spent, whole: float) -> str:
    return f"{'≤ ' * layer.bounds(0)}{layer.seconds[0] / whole:.1%}"


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{figure(count / 1e6)} MB"


def _widths(layer: Spent) -> str:
    texts = [f"{w[0]} → {w[1]}" for w in dict.fromkeys(layer.widths) if w is not None]
    return ", ".join(texts)
