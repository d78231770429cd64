"""Paths of the files that come with the package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
SHIPPED_WEIGHTS = {name: FOLDER / f"{name}.safetensors" for name in ("resnet20", "resnet11_wide")}
"""Trained weights by the built-in network that they fit."""
SAMPLE_IMAGES = FOLDER / "cifar10_sample.npz"
