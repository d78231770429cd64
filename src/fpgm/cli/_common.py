"""What subcommands share: options, the model and its input, progress, tables, JSON."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from torch import Tensor, nn

from fpgm.errors import ForwardError, RequestError
from fpgm.latency.backends import BACKENDS
from fpgm.models.checkpoint import load_weights, weights_file
from fpgm.models.registry import default_shape, load_model
from fpgm.pruning.plan import Frozen
from fpgm.recovery.recover import memory_at
from fpgm.utils.plain_json import finite
from fpgm.utils.rng import seed_everything
from fpgm.utils.text import escape_controls, json_escape, printable, shorten

SEED = 0
"""Fresh weights and example inputs are the same in every run."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="resnet56 (built in), torchvision:NAME, timm:NAME or path/to/file.py:factory.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=weights_file,
        help="Trained weights: safetensors or a tensor-only checkpoint; or shipped, for resnet20.",
    ),
]
Input = Annotated[
    str | None,
    typer.Option("--input", metavar="1x3x224x224", help="Shape of one input, batch included."),
]
Backend = Annotated[
    str,
    typer.Option(metavar="RUNTIME", help=f"Where time is measured: {', '.join(BACKENDS)}."),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Threads of that runtime; by default as PyTorch has."),
]
Trusted = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="FILE.py:NAME", help="Code to run, if the folder was made from any."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def build(spec: str, weights: Path | None) -> nn.Module:
    """The model a spec names, in eval mode, with trained weights or the same fresh ones as ever."""
    seed_everything(SEED)
    model = load_model(spec)
    return (load_weights(model, weights) if weights else model).eval()


def example(shape: Sequence[int]) -> Tensor:
    """Noise of a shape, the same in every run."""
    size = 4 * math.prod(shape)
    if size > memory_at(None):
        raise RequestError(f"An input of {shape_text(shape)} is larger than this machine's memory.")
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(SEED))


def input_shape(text: str | None, spec: str) -> tuple[int, ...]:
    """Read `--input`, or take what suits the model.

    >>> input_shape("1x3x64x64", "resnet56")
    (1, 3, 64, 64)
    """
    if text is None:
        return default_shape(spec)
    if not re.fullmatch(r"[1-9]\d*([x×][1-9]\d*)*", text):
        raise RequestError(f"--input is {text!r}: write sizes like 1x3x224x224.")
    return tuple(int(size) for size in re.split("[x×]", text))


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Say of a package that is not installed what brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RequestError(f'{error.name} is not installed: pip install "fpgm[{name}]"') from None


@contextmanager
def supposing(shape: Sequence[int], given: str | None) -> Iterator[None]:
    """If the model cannot take an input whose shape nobody gave, say which it was."""
    try:
        yield
    except ForwardError as error:
        if given is not None:
            raise
        raise ForwardError(
            f"{error} The input was taken to be {shape_text(shape)}: give its shape with --input."
        ) from error


Shown = TypeVar("Shown", bound="Bars")


SILENT = 30.0
"""Seconds after which a log is told where the work is."""


class Bars:
    """Progress on stderr: in a terminal a bar, gone when done; in a log a line now and then."""

    def __init__(self, *columns: ProgressColumn, quiet: bool = False) -> None:
        self.terminal = Console(stderr=True)
        self._told = time.monotonic()
        self._logs = not quiet and not self.terminal.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *columns,
            console=self.terminal,
            transient=True,
            disable=quiet or not self.terminal.is_terminal,
        )

    def __enter__(self: Shown) -> Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def log(self, doing: str) -> None:
        """Say what is being done, if nobody sees a bar and there was silence for long."""
        now = time.monotonic()
        if self._logs and now - self._told >= SILENT:
            typer.echo(doing, err=True)
            self._told = now


class Steps(Bars):
    """Names the running step and remembers how long each took."""

    def __init__(self, total: int) -> None:
        super().__init__(MofNCompleteColumn(), TimeElapsedColumn())
        self.seconds: dict[str, float] = {}
        self._name = ""
        self._task = self._progress.add_task("", total=total)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        self._name = name
        self._progress.update(self._task, description=name)
        self.log(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)
        self._progress.advance(self._task)

    def inside(self, layer: str, done: int, total: int) -> None:
        """Name the layer that the running step is at."""
        doing = f"{self._name}: {layer} ({done}/{total})"
        self._progress.update(self._task, description=doing)
        self.log(doing)


class LayerBar(Bars):
    """Shows which layer is worked on, and how many are done."""

    def __init__(self) -> None:
        super().__init__(MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._progress.add_task("")

    def show(self, layer: str, done: int, total: int) -> None:
        """Called before each layer."""
        self._progress.update(self._task, description=layer, completed=done, total=total)
        self.log(f"{layer} ({done}/{total})")


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Print a Markdown table; all but the first `left` columns hold numbers."""
    table = Table(box=box.MARKDOWN)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    # A row cut at the terminal's width would no longer be Markdown: let the terminal wrap it.
    wide = Console(width=10_000, highlight=False, markup=False, emoji=False)
    with wide.capture() as captured:
        wide.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().strip().splitlines()))


def show_frozen(frozen: Sequence[Frozen]) -> None:
    """Print what stays whole and why."""
    if frozen:
        typer.echo("\nLeft whole:\n")
        rows = [(shorten(f.layers), f.reason, str(f.channels)) for f in frozen]
        show_table(("layers", "reason", "channels"), rows, left=2)


def shape_text(shape: Sequence[int]) -> str:
    """Sizes as `--input` takes them.

    >>> shape_text((1, 3, 8, 8))
    '1x3x8x8'
    """
    return "x".join(str(size) for size in shape)


def show_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(to_json(value))


def to_json(value: Any) -> str:
    """JSON text as strict parsers want it: what is not finite becomes null."""
    text = json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False)
    return "\n".join(escape_controls(line, json_escape) for line in text.split("\n"))
