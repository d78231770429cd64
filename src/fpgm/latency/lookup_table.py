"""A table of layer latencies, measured on this machine and cached on disk.

The key is the runtime, its version, the processor, the number of threads and the layer's sizes. A
second plan on the same machine needs no measurement.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path

from fpgm.errors import FileError
from fpgm.latency.backends import Backend, runtime_errors
from fpgm.tracing.layer_calls import LayerSpec
from fpgm.utils.atomic_io import write_text
from fpgm.utils.machine_load import MachineLoad
from fpgm.utils.safe_read import cache_root, read_json
from fpgm.utils.text import reason

FORMAT = 3
MIN_SECONDS = 1e-7
"""Clocks do not resolve less."""


def default_cache() -> Path:
    """Return the folder of cached times, in FPGM_CACHE or ~/.cache/fpgm."""
    return cache_root("FPGM_CACHE") / "latency"


class LatencyTable:
    """Seconds of layers in one runtime with one number of threads."""

    def __init__(self, backend: Backend, threads: int) -> None:
        self.backend, self.threads = backend, threads
        self.header = {
            "format": FORMAT,
            "backend": backend.name,
            "version": backend.version(),
            "threads": threads,
        }
        name = hashlib.sha256(json.dumps(self.header, sort_keys=True).encode()).hexdigest()[:12]
        self.file = default_cache() / f"{backend.name}-{name}.json"
        self._seconds = self._read()
        self._unsaved = 0
        self._warned = False
        self._load = MachineLoad()

    def seconds(self, layer: LayerSpec) -> float:
        """Return the time of a layer; measure it if it is not in the table."""
        key = layer.key()
        if key not in self._seconds:
            with runtime_errors(self.backend):
                seconds = self.backend.layer_seconds(layer, self.threads)
            self._seconds[key] = max(MIN_SECONDS, seconds)
            self._unsaved += 1
        return self._seconds[key]

    def save(self) -> None:
        """Write new times to the cache; if that fails, warn once and continue.

        Times measured while other processes used the cores are not written: they would make all
        later plans worse.
        """
        if not self._unsaved or self._load.describe_contention(self.threads) is not None:
            return
        known = {**self._read(), **self._seconds}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps({**self.header, "seconds": known}, indent=1) + "\n")
        except OSError as error:
            if not self._warned:
                warnings.warn(
                    f"{self.file.parent} cannot be written: {reason(error)}. The next plan will "
                    "measure all layers again: set FPGM_CACHE to a folder that can be written.",
                    stacklevel=2,
                )
            self._warned = True
            return
        self._unsaved = 0

    def _read(self) -> dict[str, float]:
        try:
            content = read_json(self.file)
            if {key: content[key] for key in self.header} != self.header:
                raise ValueError("it was measured in a different runtime")
            known = {str(key): float(value) for key, value in content["seconds"].items()}
            if not all(0 < seconds < math.inf for seconds in known.values()):
                raise ValueError("some times are not positive and finite")
            return known
        except OSError:  # the file does not exist or may not be read
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise FileError(
                f"{self.file} is not a latency cache ({reason(error)}): delete it."
            ) from error
