"""Import torchvision even if its compiled part does not load.

torchvision registers shape rules for two of its compiled operators while it is being imported. When
the compiled part was built for another torch (for example, a CUDA wheel with a CPU torch), the
operators do not exist and the import itself fails, though models need them only in the last step of
detection. Declaring the two signatures is enough for everything except running `nms`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType

import torch

from fpgm.errors import RequestError
from fpgm.utils.thread_lock import GLOBAL_LOCK

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# A declaration exists as long as its Library object.
_declared: list[torch.library.Library] = []


def import_torchvision(what: str = "This model") -> ModuleType:
    """Import torchvision, and declare operators that its compiled part did not register.

    Args:
        what: the user's request that needs it, for the message if it is not installed.
    """
    try:
        return _import()
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise RequestError(f'{what} needs torchvision: pip install "fpgm[zoo]"') from None
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
    # The failed attempt leaves half-imported submodules, which a second attempt would reuse.
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _declared.append(library)
    return _import()


def _import() -> ModuleType:
    with GLOBAL_LOCK, warnings.catch_warnings():
        # Reading and writing image files is the other half of the compiled part; no model uses it.
        warnings.filterwarnings("ignore", "Failed to load image Python extension")
        return importlib.import_module("torchvision")
