"""The recipes that come with the package, for `fpgm train`."""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parent
