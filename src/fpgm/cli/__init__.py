"""The command line, one file per command; `main` registers them and sets exit codes."""

from fpgm.cli.main import app

__all__ = ["app"]
