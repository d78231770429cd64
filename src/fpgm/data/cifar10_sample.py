"""The first images of CIFAR-10, packed small enough to ship with the package.

Neighboring pixels and the three colors of a pixel are similar, so differences are stored: they
compress by a third, the images themselves hardly at all.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fpgm.data.in_memory import Images
from fpgm.models.assets import SAMPLE_IMAGES
from fpgm.utils.atomic_io import atomic_write_stream

Bytes = NDArray[np.uint8]


def read_sample(file: Path = SAMPLE_IMAGES) -> tuple[Images, Images]:
    """Read the images to train and to test on."""
    with np.load(file, allow_pickle=False) as packed:
        train, test = (
            Images(
                torch.from_numpy(unpack(packed[f"{part}_images"])),
                torch.from_numpy(packed[f"{part}_labels"]).long(),
            )
            for part in ("train", "test")
        )
    return train, test


def write_sample(file: Path, train: Images, test: Images) -> None:
    """Pack images into one file."""
    arrays: dict[str, Any] = {}
    for part, data in (("train", train), ("test", test)):
        arrays[f"{part}_images"] = pack(data.images.numpy())
        arrays[f"{part}_labels"] = data.labels.numpy().astype(np.uint8)
    atomic_write_stream(file, partial(np.savez_compressed, **arrays))


def pack(images: Bytes) -> Bytes:
    """Encode RGB images [N, 3, H, W] as differences, modulo 256: from green, then from the left.

    >>> images = np.arange(96, dtype=np.uint8).reshape(2, 3, 4, 4) * 7
    >>> bool((unpack(pack(images)) == images).all())
    True
    """
    packed: Bytes = images.copy()
    packed[:, ::2] -= images[:, 1:2]
    packed[..., 1:] -= packed[..., :-1].copy()
    return packed


def unpack(packed: Bytes) -> Bytes:
    """Decode what `pack` returned."""
    images: Bytes = np.cumsum(packed, axis=-1, dtype=np.uint8)
    images[:, ::2] += images[:, 1:2]
    return images
