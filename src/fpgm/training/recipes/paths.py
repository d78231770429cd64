"""The folder of the included recipes."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).resolve().parent
