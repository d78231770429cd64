"""The command line, one file a subcommand.

Here is only what they share towards the shell: a request that makes no sense ends with one line on
stderr and code 2, a failed verification with code 1, and never with a traceback.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

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

__all__ = ["app"]

# Public in every version of typer, unlike its base, which wrong options and commands raise.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class _Group(TyperGroup):
    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        options |= {"standalone_mode": False, "prog_name": "fpgm"}
        try:
            code = super().main(given, *rest, obj=shlex.join(["fpgm", *given]), **options)
        except VerificationError as error:
            _complain(str(error))
            code = 1
        except FpgmError as error:
            _complain(str(error))
            code = 2
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else "fpgm"
            message = error.format_message()
            stop = "" if message.endswith((".", "?")) else "."
            _complain(f"{message}{stop} See {command} --help.")
            code = 2
        except typer.Abort:
            code = 130
        sys.exit(code if isinstance(code, int) else 0)


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
    typer.echo(f"fpgm: {' '.join(message.split())}", err=True)
