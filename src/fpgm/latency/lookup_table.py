"""A table of how long layers take at their possible widths, measured here and kept on disk.

Times are kept by runtime, its version, the processor, threads and the layer's sizes, so a second
plan for the same machine costs no measurement.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path

from fpgm.errors import FileError
from fpgm.latency.backends import Backend, running
from fpgm.tracing.layer_calls import Layer
from fpgm.utils.atomic_io import write_text
from fpgm.utils.machine_load import Neighbours
from fpgm.utils.safe_read import cache_root, json_of
from fpgm.utils.text import reason

FORMAT = 3
LEAST = 1e-7
"""Seconds: less is what a clock does not tell."""


def default_cache() -> Path:
    """Where times are kept: the folder that FPGM_CACHE names, or ~/.cache/fpgm."""
    return cache_root("FPGM_CACHE") / "latency"


class Table:
    """Seconds of layers in one runtime with so many threads."""

    def __init__(self, backend: Backend, threads: int) -> None:
        self.backend, self.threads = backend, threads
        self.about = {
            "format": FORMAT,
            "backend": backend.name,
            "version": backend.version(),
            "threads": threads,
        }
        name = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:12]
        self.file = default_cache() / f"{backend.name}-{name}.json"
        self._seconds = self._read()
        self._unsaved = 0
        self._refused = False
        self._neighbours = Neighbours()

    def seconds(self, layer: Layer) -> float:
        """How long a layer takes, measured if it is not known."""
        key = layer.key()
        if key not in self._seconds:
            with running(self.backend):
                taken = self.backend.layer_seconds(layer, self.threads)
            self._seconds[key] = max(LEAST, taken)
            self._unsaved += 1
        return self._seconds[key]

    def save(self) -> None:
        """Keep what was measured; a disk that refuses, of which a warning tells once, costs time.

        Times taken while others worked are not kept: they would spoil every plan to come.
        """
        if not self._unsaved or self._neighbours.crowd(self.threads) is not None:
            return
        known = {**self._read(), **self._seconds}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps({**self.about, "seconds": known}, indent=1) + "\n")
        except OSError as error:
            if not self._refused:
                warnings.warn(
                    f"{self.file.parent} cannot be written: {reason(error)}. The next plan will "
                    "measure layers anew: let FPGM_CACHE name a folder for their times.",
                    stacklevel=2,
                )
            self._refused = True
            return
        self._unsaved = 0

    def _read(self) -> dict[str, float]:
        try:
            found = json_of(self.file)
            if {key: found[key] for key in self.about} != self.about:
                raise ValueError("it is about something else")
            known = {str(key): float(value) for key, value in found["seconds"].items()}
            if not all(0 < seconds < math.inf for seconds in known.values()):
                raise ValueError("some are no times")
            return known
        except OSError:  # nothing there, or nothing that may be read
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise FileError(
                f"{self.file} holds no times of layers ({reason(error)}): delete it."
            ) from error
