"""All options of `fpgm.plan` as one value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fpgm.errors import RequestError
from fpgm.latency.budget_search import BackendConfig
from fpgm.planning.budget import Budget
from fpgm.planning.options import PlanOptions, are_texts, criterion_name
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.utils.progress import Progress

Allocate = Literal["uniform", "sensitivity"] | Sensitivity


@dataclass(frozen=True)
class PlanRequest(PlanOptions):
    """The options of `fpgm.plan`, which explains each."""

    rate: float | None = None
    macs: float | None = None
    params: float | None = None
    latency: float | None = None
    rates: Mapping[str, float] | None = None
    allocate: Allocate = "uniform"
    loader: Iterable[Any] | None = None
    backend: str = "eager"
    threads: int | None = None
    progress: Progress | None = None

    @property
    def budget(self) -> Budget:
        """Return the amount to remove."""
        if not isinstance(self.rates or {}, Mapping) or not are_texts(self.rates or {}):
            raise RequestError(f'rates is {self.rates!r}: give a dict such as {{"layer3.*": 0.2}}.')
        rates = dict(self.rates or {})
        return Budget(self.rate, self.macs, self.params, rates, self.latency)

    @property
    def where(self) -> BackendConfig:
        """Return the runtime in which time is measured."""
        return BackendConfig.of(self.backend, self.threads)

    @property
    def measures(self) -> bool:
        """Tell whether planning runs the model many times, to measure time or output errors."""
        measured = self.latency is not None or self.align == "auto"
        return measured or self.allocate == "sensitivity"

    def to_dict(self) -> dict[str, Any]:
        """Return the options that decide the plan, as results.json has them."""
        request: dict[str, Any] = {
            "rate": self.rate,
            "macs": self.macs,
            "params": self.params,
            "latency": self.latency,
            "rates": dict(self.rates or {}),
            "criterion": criterion_name(self.criterion),
            "distance": self.distance,
            "residual": self.residual,
            "ignore": list(self.ignore),
            "align": self.align,
            "rounding": self.rounding,
            "min_channels": self.min_channels,
            "approximate": self.approximate,
        }
        if self.latency is not None or self.align == "auto":
            request |= {"backend": self.backend, "threads": self.threads}
        return request
