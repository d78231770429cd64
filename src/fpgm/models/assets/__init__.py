"""Trained networks and real images for use offline; README.md says where they are from.

Written by `scripts/assets.py`.
"""

from fpgm.models.assets.paths import FOLDER, SAMPLE_IMAGES, SHIPPED_WEIGHTS

__all__ = ["FOLDER", "SAMPLE_IMAGES", "SHIPPED_WEIGHTS"]
