"""Where the shipped recipes are."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).resolve().parent
