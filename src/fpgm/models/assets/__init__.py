"""What ships so that a real network can be pruned on real pictures offline; README.md says whence.

Written by `scripts/assets.py`.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
WEIGHTS = FOLDER / "resnet20.safetensors"
PICTURES = FOLDER / "cifar10_sample.npz"
