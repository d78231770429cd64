"""Paths of the files that come with the package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
WEIGHTS = FOLDER / "resnet20.safetensors"
SAMPLE_IMAGES = FOLDER / "cifar10_sample.npz"
