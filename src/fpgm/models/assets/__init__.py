"""What ships so that a real network can be pruned on real pictures offline; README.md says whence.

Written by `scripts/assets.py`.
"""

from fpgm.models.assets.paths import FOLDER, SAMPLE_IMAGES, WEIGHTS

__all__ = ["FOLDER", "SAMPLE_IMAGES", "WEIGHTS"]
