"""Smaller, faster convolutional networks by filter pruning via geometric median.

    plan = fpgm.plan(model, example_inputs, rate=0.4)    # nothing has happened yet
    small = fpgm.compact(model, plan)                    # a new module; model itself is untouched
    fpgm.verify(model, plan, example_inputs).check()     # proof that small is what was planned
    fpgm.save(small, "small.safetensors")                # weights and plan, no pickle

The names below are all there is to rely on; modules behind them may change.
"""

from fpgm._version import __version__
from fpgm.analysis import analyze
from fpgm.compact import compact
from fpgm.errors import (
    FileError,
    FpgmError,
    ModelError,
    PlanError,
    RequestError,
    VerificationError,
)
from fpgm.export import export
from fpgm.harm.result import Sensitivity
from fpgm.latency.bench import bench
from fpgm.masking import mask_
from fpgm.plan import Plan
from fpgm.planning import plan, prune
from fpgm.recovery import recover
from fpgm.sensitivity import sensitivity
from fpgm.soft import SoftPruner
from fpgm.store import load, save
from fpgm.verify import Certificate, verify

__all__ = [
    "Certificate",
    "FileError",
    "FpgmError",
    "ModelError",
    "Plan",
    "PlanError",
    "RequestError",
    "Sensitivity",
    "SoftPruner",
    "VerificationError",
    "__version__",
    "analyze",
    "bench",
    "compact",
    "export",
    "load",
    "mask_",
    "plan",
    "prune",
    "recover",
    "save",
    "sensitivity",
    "verify",
]
