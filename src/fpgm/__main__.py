"""`python -m fpgm`, which launchers of many processes can start."""

from fpgm.cli import app

app()
