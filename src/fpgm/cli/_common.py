"""Shared by subcommands: options, the model and its input, progress, tables, JSON."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

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
from typer.core import TyperCommand, TyperGroup

from fpgm.criteria import NAMES
from fpgm.errors import ForwardError, FpgmError, RankError, RequestError, VerificationError
from fpgm.latency.backends import BACKENDS
from fpgm.models.assets import SHIPPED_WEIGHTS
from fpgm.models.checkpoint import weights_file
from fpgm.models.registry import default_shape
from fpgm.pruning.plan import Frozen
from fpgm.utils.distributed import init_process_group, is_main_process
from fpgm.utils.machine_load import MachineLoad
from fpgm.utils.plain_json import to_json
from fpgm.utils.text import escape_text, shorten
from fpgm.workflow.original_model import shape_text

P = ParamSpec("P")

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
        help="Load trained weights: safetensors, a tensor-only checkpoint, or shipped "
        f"({', '.join(SHIPPED_WEIGHTS)}).",
    ),
]
Input = Annotated[
    str | None,
    typer.Option(
        "--input", metavar="1x3x224x224", help="Set the input shape, including the batch size."
    ),
]
Backend = Annotated[
    str,
    typer.Option(metavar="RUNTIME", help=f"Measure time in this runtime: {', '.join(BACKENDS)}."),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Use this many threads; default: PyTorch's number."),
]
Trusted = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="FILE.py:NAME",
        help="Allow this code to run; needed if the folder's model comes from a Python file.",
    ),
]
Criterion = Annotated[
    str, typer.Option(metavar="NAME", help=f"Rank filters by one of {', '.join(NAMES)}.")
]
Residual = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="coupled: prune the layers of a residual stream together; independent: separately.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
All = Annotated[bool, typer.Option("--all", help="Print all rows of long tables.")]


class _PlainHelp:
    """Leaves the type of a switch out of the help: it takes no value."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        for param in self.get_params(ctx):
            if getattr(param, "is_bool_flag", False):
                param.metavar = ""
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(_PlainHelp, TyperCommand):
    """A command with plain help."""


class CommandGroup(_PlainHelp, TyperGroup):
    """A group of commands with plain help."""


def read_fraction(text: str) -> float:
    """Read the value of an option such as `--macs`.

    >>> read_fraction("0.4")
    0.4
    """
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a number. Give a fraction such as 0.5 for 50 %."
        ) from None


def input_shape(text: str | None, spec: str) -> tuple[int, ...]:
    """Read `--input`, or use the model's default shape.

    >>> input_shape("1x3x64x64", "resnet56")
    (1, 3, 64, 64)
    """
    if text is None:
        return default_shape(spec)
    if not re.fullmatch(r"[1-9]\d*([x×][1-9]\d*)*", text):
        raise RequestError(f"--input is {text!r}: write sizes like 1x3x224x224.")
    return tuple(int(size) for size in re.split("[x×]", text))


@contextmanager
def explain_missing_extra(name: str, what: str) -> Iterator[None]:
    """Name the extra to install if a package is missing that the user's request needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RequestError(f'{what} needs {error.name}: pip install "fpgm[{name}]"') from None


@contextmanager
def explain_assumed_shape(shape: Sequence[int], given: str | None) -> Iterator[None]:
    """Name the assumed input shape if the model cannot take it and --input was not given."""
    try:
        yield
    except ForwardError as error:
        if given is not None:
            raise
        raise ForwardError(
            f"{error} The input shape was assumed to be {shape_text(shape)}: set it with --input."
        ) from error


def set_threads(count: int) -> None:
    """Use this many threads in PyTorch, and in libraries and processes that start later."""
    if count < 1:
        raise RequestError(f"--threads is {count}: give a whole number from 1 up.")
    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)


def takes_threads(command: Callable[P, None]) -> Callable[P, None]:
    """Decorate a command so that it takes `--threads`; one that has the option keeps it."""
    signature = inspect.signature(command, eval_str=True)
    parameters, has_own = list(signature.parameters.values()), "threads" in signature.parameters
    if not has_own:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("threads", kind, default=None, annotation=Threads))

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        threads = kwargs.get("threads") if has_own else kwargs.pop("threads", None)
        if isinstance(threads, int):  # `bench` measures a list of them
            set_threads(threads)
        command(*args, **kwargs)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def divide_work(command: Callable[P, None]) -> Callable[P, None]:
    """Decorate a command whose work the processes of torchrun divide.

    All of them end with the same code, but only the first one prints.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        ranks = init_process_group()
        try:
            with ranks.fail_together():
                command(*args, **kwargs)
        except FpgmError as error:
            if ranks.is_first:
                raise
            kind = error.kind if isinstance(error, RankError) else type(error).__name__
            raise typer.Exit(1 if kind == VerificationError.__name__ else 2) from None

    return run


BarsType = TypeVar("BarsType", bound="ProgressBars")


LOG_SECONDS = 30.0
"""Seconds between two lines of progress in a log."""
LOAD_SECONDS = 2.0
"""Seconds of work after which a terminal shows that the machine is busy; a log after more."""
ROWS = 12
"""Rows of a long table that are printed without --all."""


class ProgressBars:
    """Progress on stderr: a bar in a terminal, a line from time to time in a log."""

    def __init__(self, *columns: ProgressColumn) -> None:
        self.terminal, quiet = Console(stderr=True), not is_main_process()
        self._last_logged = time.monotonic()
        self._logs = not quiet and not self.terminal.is_terminal
        self._load: MachineLoad | None = None if quiet else MachineLoad()
        self._check_at = self._last_logged + (LOG_SECONDS if self._logs else LOAD_SECONDS)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *columns,
            console=self.terminal,
            transient=True,
            disable=quiet or not self.terminal.is_terminal,
        )

    def __enter__(self: BarsType) -> BarsType:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def log(self, doing: str) -> None:
        """Print the current step if there is no bar and nothing was printed for a while."""
        now = time.monotonic()
        if self._load is not None and now >= self._check_at:
            show_contention(self.terminal, self._load)
            self._load = None  # once is enough
        if self._logs and now - self._last_logged >= LOG_SECONDS:
            typer.echo(doing, err=True)
            self._last_logged = now


def show_contention(terminal: Console, load: MachineLoad) -> None:
    """Print one line if other processes take cores that this one computes with."""
    threads = torch.get_num_threads()
    if (contention := load.describe_contention(threads)) is not None:
        hint = f" This one uses {threads} threads; fewer are often faster: --threads 1."
        line = f"The machine is busy: {contention}.{hint if threads > 1 else ''}"
        terminal.print(line, style="yellow", highlight=False, soft_wrap=True)


class StepBar(ProgressBars):
    """Names the running step and remembers how long each took."""

    def __init__(self, total: int) -> None:
        super().__init__(MofNCompleteColumn(), TimeElapsedColumn())
        self.seconds: dict[str, float] = {}
        self._name = ""
        self._task = self._progress.add_task("", total=total)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the block."""
        self._name = name
        self._progress.update(self._task, description=name)
        self.log(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)
        self._progress.advance(self._task)

    def report_layer(self, layer: str, done: int, total: int) -> None:
        """Report the layer that the current step works on."""
        doing = f"{self._name}: {layer} ({done}/{total})"
        self._progress.update(self._task, description=doing)
        self.log(doing)


class LayerBar(ProgressBars):
    """Shows the current layer, and how many are done."""

    def __init__(self) -> None:
        super().__init__(MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._progress.add_task("")

    def show(self, layer: str, done: int, total: int) -> None:
        """Show the current layer, and how many are done."""
        self._progress.update(self._task, description=layer, completed=done, total=total)
        self.log(f"{layer} ({done}/{total})")


def show_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
    most: int | None = None,
) -> None:
    """Print a Markdown table; all but the first `left` columns hold numbers.

    Args:
        header: names of the columns.
        rows: their cells.
        left: columns that are aligned left.
        most: rows to print; a line says how many more there are.
    """
    rows = list(rows)
    most = len(rows) if most is None else most
    table = Table(box=box.MARKDOWN)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for row in rows[:most]:
        table.add_row(*(escape_text(cell) for cell in row))
    # A row cut at the terminal's width would no longer be Markdown: let the terminal wrap it.
    wide = Console(width=10_000, highlight=False, markup=False, emoji=False)
    with wide.capture() as captured:
        wide.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().strip().splitlines()))
    if len(rows) > most:
        typer.echo(more_rows(len(rows) - most))


def more_rows(count: int) -> str:
    """Write what stands for the rows that a long table leaves out."""
    return f"… and {count} more (--all)"


def show_frozen(frozen: Sequence[Frozen], most: int | None = None) -> None:
    """Print the frozen layers and the reasons."""
    if frozen:
        typer.echo("\nNot pruned:\n")
        rows = [(shorten(f.layers), f.reason, str(f.channels)) for f in frozen]
        show_table(("layers", "reason", "channels"), rows, left=2, most=most)


def show_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(to_json(value))
