"""`python -m fpgm`, for launchers such as torchrun."""

from fpgm.cli import app

app()
