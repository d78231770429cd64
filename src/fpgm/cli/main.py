"""The `fpgm` command: all subcommands, errors and exit codes.

An invalid request ends with one line on stderr and code 2, a failed verification with code 1,
Ctrl-C with code 130, and never with a traceback. Warnings of this package are one line too.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fpgm._version import __version__
from fpgm.cli import _common as common
from fpgm.cli.analyze import analyze
from fpgm.cli.bench import bench
from fpgm.cli.compare import compare
from fpgm.cli.data import data
from fpgm.cli.export import export
from fpgm.cli.inspect import inspect
from fpgm.cli.prune import prune
from fpgm.cli.recover import recover
from fpgm.cli.report import report
from fpgm.cli.reproduce import reproduce
from fpgm.cli.sensitivity import sensitivity
from fpgm.cli.train import train
from fpgm.cli.verify import verify
from fpgm.errors import FpgmError, VerificationError
from fpgm.utils.distributed import is_main_process, was_initialized, world_size
from fpgm.utils.text import reason

# Public in every version of typer, unlike its base, which wrong options and commands raise.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class _SignalStop(Exception):  # noqa: N818  (no error: it was asked for)
    """The user pressed Ctrl-C."""


class _MainCommand(common.CommandGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # the way to end it depends on typer's version
            raise _SignalStop from None

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        options |= {"standalone_mode": False, "prog_name": "fpgm"}
        _escape_unencodable()
        with _shorten_warnings():
            code = self._exit_code(given, *rest, obj=shlex.join(["fpgm", *given]), **options)
        _exit(code)

    def _exit_code(self, *args: Any, **options: Any) -> int:
        """Run the command, print its error if it fails, and return its exit code."""
        try:
            code = super().main(*args, **options)
        except VerificationError as error:
            _print_error(str(error))
            return 1
        except FpgmError as error:
            _print_error(str(error))
            return 2
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else "fpgm"
            message = error.format_message()
            stop = "" if message.endswith((".", "?")) else "."
            _print_error(f"{message}{stop} See {command} --help.")
            return 2
        except (_SignalStop, KeyboardInterrupt, typer.Abort):
            _print_error("stopped.")
            return 130
        except OSError as error:  # of the disk or the terminal, wherever nothing better is known
            what = f"{error.filename}: " if error.filename is not None else ""
            _print_error(f"{what}{reason(error)}.")
            return 2
        return code if isinstance(code, int) else 0


_SHARED = ("prune", "recover", "reproduce", "sensitivity", "train")
"""Commands whose work the processes of a launcher divide, or that refuse a launcher themselves."""

app = typer.Typer(
    cls=_MainCommand,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

START, MEASURE, RESEARCH = "Start here", "Measure", "Research"
EXAMPLES: dict[Callable[..., None], tuple[str, str]] = {
    inspect: (START, "inspect resnet56"),
    prune: (START, "prune resnet11_wide --weights shipped --macs 0.5 --out runs/small"),
    recover: (START, "recover runs/small --data cifar10-sample"),
    verify: (START, "verify runs/small"),
    export: (START, "export runs/small --out small.onnx"),
    report: (START, "report runs/small --open"),
    train: (START, "train digits-quick --out runs/digits"),
    bench: (MEASURE, "bench runs/small --backend onnxruntime --batch 8"),
    analyze: (MEASURE, "analyze resnet20 --weights shipped"),
    sensitivity: (
        MEASURE, "sensitivity resnet20 --weights shipped --data cifar10-sample --out s.json"
    ),
    compare: (
        RESEARCH,
        "compare resnet20 --weights shipped --data cifar10-sample --macs 0.4 --out runs/all",
    ),
    reproduce: (RESEARCH, "reproduce table1 --list"),
}  # fmt: skip
"""Where a command stands in the help, and an example."""
for _command, (_panel, _example) in EXAMPLES.items():
    app.command(cls=common.Command, rich_help_panel=_panel, epilog=f"Example: fpgm {_example}")(
        common.takes_threads(_command)
    )
app.add_typer(data, name="data", rich_help_panel=RESEARCH, epilog="Example: fpgm data cifar10")


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    threads: common.Threads = None,
) -> None:
    """Prune PyTorch models by geometric median, and verify the smaller model."""
    if "NO_COLOR" in os.environ:
        context.color = False
    if threads is not None:
        common.set_threads(threads)
    if version:
        typer.echo(f"fpgm {__version__}")
        raise typer.Exit
    name = context.invoked_subcommand
    if world_size() > 1 and not is_main_process() and name not in _SHARED:
        _print_error(f"{name} runs in the first process only: nothing to do in the others.")
        raise typer.Exit


def _print_error(message: str) -> None:
    with suppress(OSError):  # if stderr is closed, the exit code is left
        typer.echo(f"fpgm: {' '.join(message.split())}", err=True)


@contextmanager
def _shorten_warnings() -> Iterator[None]:
    """Print warnings of this package without file and line."""
    ours = str(Path(__file__).parents[1])
    with warnings.catch_warnings():
        plainly = warnings.showwarning

        def show(message: Any, category: Any, filename: str, *rest: Any, **options: Any) -> None:
            if filename.startswith(ours):
                if is_main_process():
                    _print_error(str(message))
            else:
                plainly(message, category, filename, *rest, **options)

        warnings.showwarning = show
        yield


def _escape_unencodable() -> None:
    """Print escapes for what a terminal cannot encode, such as file names that are not text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _exit(code: int) -> NoReturn:
    """Exit with a code, even if the last output cannot be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if code == 0:
            _print_error(f"The result cannot be printed: {reason(error)}.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again
        code = code or 1
    if was_initialized():
        _exit_without_teardown(code)
    sys.exit(code)


def _exit_without_teardown(code: int) -> NoReturn:
    """Exit a process of a process group without tearing the interpreter down.

    A network wrapped in DistributedDataParallel keeps gloo's threads alive even after the process
    group is destroyed. If such a thread frees a tensor while the interpreter shuts down, the
    process aborts, and the launcher reports a failure although the work is done.
    """
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
