"""Smaller, faster convolutional networks by filter pruning via geometric median.

    plan = fpgm.plan(model, example_inputs, rate=0.4)    # nothing has happened yet
    small = fpgm.compact(model, plan)                    # a new module; model itself is untouched
    fpgm.verify(model, plan, example_inputs).check()     # compare with the masked model
    fpgm.save(small, "small.safetensors")                # weights and plan, no pickle

Only the names below are public; the modules that define them may change.
"""

from fpgm._version import __version__
from fpgm.errors import FileError, FpgmError, ModelError, PlanError, RequestError, VerificationError
from fpgm.exporters.api import export
from fpgm.latency.benchmark import bench
from fpgm.pruning.compaction import compact
from fpgm.pruning.masking import mask_
from fpgm.pruning.plan import Plan
from fpgm.pruning.serialization import load, save
from fpgm.pruning.verification import Certificate, verify
from fpgm.recovery.api import recover
from fpgm.recovery.sensitivity.api import sensitivity
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.report.analysis.api import analyze
from fpgm.workflow.api import plan, prune
from fpgm.workflow.soft_pruner import SoftPruner

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
