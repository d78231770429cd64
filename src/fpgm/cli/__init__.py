"""The command line, one file for each command; `main` has what they share towards the shell."""

from fpgm.cli.main import app

__all__ = ["app"]
