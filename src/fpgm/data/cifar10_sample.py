"""The first images of CIFAR-10, packed small enough to ship with the package.

Test images are stored exactly, so that an accuracy on them is the real one. Training images are for
calibration and are stored as JPEG stores them, by quantized cosine coefficients: a third of the
size, with an error of 3 of 255 levels.
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
Coefficients = NDArray[np.int8]
Floats = NDArray[np.float64]

BLOCK = 8
"""Pixels along the side of a block that is transformed at once."""
STEPS = (8, 16, 16)
"""Quantization steps of luma and of the two color differences."""
COLORS: Floats = np.array([[0.25, 0.5, 0.25], [1, -1, 0], [0, -1, 1]])
"""From red, green and blue to luma and color differences, which vary less."""


def read_sample(file: Path = SAMPLE_IMAGES) -> tuple[Images, Images]:
    """Read the images to calibrate or train with, and those to test on."""
    with np.load(file, allow_pickle=False) as packed:
        train, test = (
            Images(
                torch.from_numpy(decode(packed[f"{part}_images"])),
                torch.from_numpy(packed[f"{part}_labels"]).long(),
            )
            for part, decode in (("train", unpack_lossy), ("test", unpack))
        )
    return train, test


def write_sample(file: Path, train: Images, test: Images) -> None:
    """Pack images into one file; the training images change a little."""
    arrays: dict[str, Any] = {
        "train_images": pack_lossy(train.images.numpy()),
        "test_images": pack(test.images.numpy()),
    }
    for part, data in (("train", train), ("test", test)):
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


def pack_lossy(images: Bytes, steps: tuple[int, ...] = STEPS) -> Coefficients:
    """Encode RGB images [N, 3, H, W] as quantized cosine coefficients of blocks.

    Most coefficients are zero, and equal ones lie together, so the result compresses well.

    >>> images = np.full((1, 3, 8, 8), 200, dtype=np.uint8)
    >>> pack_lossy(images).ravel()[:3]  # (200 - 128) * 8 / 8, and no color
    array([72,  0,  0], dtype=int8)
    >>> bool((unpack_lossy(pack_lossy(images)) == images).all())
    True
    """
    count, channels, height, width = images.shape
    planes = np.einsum("dc,nchw->ndhw", COLORS, images.astype(np.float64) - 128)
    blocks = planes.reshape(count, channels, height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    cosines = _cosines()
    coefficients = cosines @ blocks.swapaxes(3, 4) @ cosines.T
    levels = np.round(coefficients / _per_channel(steps)).clip(-127, 127).astype(np.int8)
    return np.ascontiguousarray(levels.transpose(4, 5, 1, 0, 2, 3))


def unpack_lossy(packed: Coefficients, steps: tuple[int, ...] = STEPS) -> Bytes:
    """Decode what `pack_lossy` returned."""
    coefficients = packed.transpose(3, 2, 4, 5, 0, 1) * _per_channel(steps)
    cosines = _cosines()
    blocks = (cosines.T @ coefficients @ cosines).swapaxes(3, 4)
    count, channels, rows, _, columns, _ = blocks.shape
    planes = blocks.reshape(count, channels, rows * BLOCK, columns * BLOCK)
    images = np.einsum("cd,ndhw->nchw", np.linalg.inv(COLORS), planes) + 128
    decoded: Bytes = images.round().clip(0, 255).astype(np.uint8)
    return decoded


def _cosines() -> Floats:
    """Return the orthonormal matrix of the discrete cosine transform, one frequency a row."""
    frequency, position = np.mgrid[:BLOCK, :BLOCK]
    cosines: Floats = np.cos((2 * position + 1) * frequency * np.pi / (2 * BLOCK))
    cosines *= np.sqrt(np.where(frequency == 0, 1, 2) / BLOCK)
    return cosines


def _per_channel(steps: tuple[int, ...]) -> Floats:
    """Shape one step a channel for arrays [N, C, rows, columns, BLOCK, BLOCK]."""
    return np.asarray(steps, dtype=np.float64)[:, None, None, None, None]
