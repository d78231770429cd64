"""Find the trained CIFAR-10 networks that benchmarks start from.

They are the ResNet-20, 32 and 56 of the public repository akamaster/pytorch_resnet_cifar10, their
state dicts without `module.` as cifar10_resnet20.safetensors and so on. They do not come with the
package: FPGM_WEIGHTS or --weights names their folder.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "weights"
"""The default folder."""


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of weights; a folder without them is refused in one line."""
    default = os.environ.get("FPGM_WEIGHTS", str(BESIDE))
    parser.add_argument(
        "--weights", metavar="DIR", type=_folder, default=default,
        help="trained CIFAR-10 networks (benchmarks/trained.py); by default FPGM_WEIGHTS",
    )  # fmt: skip


def _folder(text: str) -> Path:
    place = Path(text)
    if not any(place.glob("cifar10_resnet*.safetensors")):
        raise argparse.ArgumentTypeError(
            f"{place} has no cifar10_resnet56.safetensors or the like: set FPGM_WEIGHTS to their "
            "folder (see benchmarks/trained.py)."
        )
    return place
