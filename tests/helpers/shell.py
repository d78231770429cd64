"""The command line, called in this process."""

import re

from typer.testing import CliRunner

from fpgm.cli import app


def run(*args: object, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a command that must end with this code."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def refused(*args: object, code: int = 2) -> str:
    """The one line that a command ends with."""
    out, err = run(*args, code=code)
    assert out == ""
    assert err.startswith("fpgm: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("fpgm: ").rstrip("\n")


def without_numbers(text: str) -> str:
    """With # for the differences of a certificate, which rounding changes."""
    return re.sub(r"(?<=by )[\d.e+-]*\d(?= |,|\.\n)", "#", text)
