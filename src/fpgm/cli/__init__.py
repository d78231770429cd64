"""The command line, one file a subcommand.

Here is only what they share towards the shell: a request that makes no sense ends with one line on
stderr and code 2, a failed verification with code 1, Ctrl-C with code 130, and never with a
traceback. Warnings of this package are one line too.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fpgm._version import __version__
from fpgm.cli.analyze import analyze
from fpgm.cli.bench import bench
from fpgm.cli.compare import compare
from fpgm.cli.data import data
from fpgm.cli.export import export
from fpgm.cli.inspect import inspect
from fpgm.cli.prune import prune
from fpgm.cli.report import report
from fpgm.cli.reproduce import reproduce
from fpgm.cli.sensitivity import sensitivity
from fpgm.cli.train import train
from fpgm.cli.verify import verify
from fpgm.errors import FpgmError, VerificationError
from fpgm.utils.distributed import met
from fpgm.utils.text import reason

__all__ = ["app"]

# Public in every version of typer, unlike its base, which wrong options and commands raise.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class _Stopped(Exception):  # noqa: N818  (no error: it was asked for)
    """Somebody pressed Ctrl-C."""


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # versions of typer end it in different ways
            raise _Stopped from None

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        options |= {"standalone_mode": False, "prog_name": "fpgm"}
        _accept_any_name()
        with _warnings_in_one_line():
            code = self._code(given, *rest, obj=shlex.join(["fpgm", *given]), **options)
        _say_no_more(code)

    def _code(self, *args: Any, **options: Any) -> int:
        """With which the command ends; what went wrong is said."""
        try:
            code = super().main(*args, **options)
        except VerificationError as error:
            _complain(str(error))
            return 1
        except FpgmError as error:
            _complain(str(error))
            return 2
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else "fpgm"
            message = error.format_message()
            stop = "" if message.endswith((".", "?")) else "."
            _complain(f"{message}{stop} See {command} --help.")
            return 2
        except (_Stopped, KeyboardInterrupt, typer.Abort):
            _complain("stopped.")
            return 130
        except OSError as error:  # of the disk or the terminal, wherever nothing better is known
            what = f"{error.filename}: " if error.filename is not None else ""
            _complain(f"{what}{reason(error)}.")
            return 2
        return code if isinstance(code, int) else 0


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(analyze)
app.command()(bench)
app.command()(compare)
app.command()(export)
app.command()(inspect)
app.command()(prune)
app.command()(report)
app.command()(reproduce)
app.command()(sensitivity)
app.command()(train)
app.command()(verify)
app.add_typer(data, name="data")


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Filter pruning via geometric median: from a PyTorch model to a certified smaller one."""
    if version:
        typer.echo(f"fpgm {__version__}")
        raise typer.Exit


def _complain(message: str) -> None:
    with suppress(OSError):  # if nobody listens, the code tells
        typer.echo(f"fpgm: {' '.join(message.split())}", err=True)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Those of this package: where in its code they arise helps nobody at a shell."""
    ours = str(Path(__file__).parents[1])
    with warnings.catch_warnings():
        plainly = warnings.showwarning

        def show(message: Any, category: Any, filename: str, *rest: Any, **options: Any) -> None:
            if filename.startswith(ours):
                _complain(str(message))
            else:
                plainly(message, category, filename, *rest, **options)

        warnings.showwarning = show
        yield


def _accept_any_name() -> None:
    """Names of files need not be text, and terminals need not know all letters: show escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _say_no_more(code: int) -> NoReturn:
    """End with a code, even if what was said last can no longer be delivered."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if code == 0:
            _complain(f"What was found cannot be printed: {reason(error)}.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again
        code = code or 1
    if met():
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """End a process that met others, without taking the interpreter down piece by piece.

    Wrapped by DistributedDataParallel, a network keeps gloo's threads to the end, destroyed group
    or not. One that lets go of a tensor while the interpreter goes aborts the process, whose work
    is done, and the launcher calls all of it failed.
    """
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
