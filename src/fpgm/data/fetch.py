"""Download an archive: over HTTP with resume, or with `npm pack`.

Reading the archive is up to the caller. If a source fails, `Unavailable` is raised with the reason,
since another source may work. If the disk fails, FileError is raised, since no source would help.

pooch and torchvision start an interrupted download again from the beginning, and know no npm.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError

from fpgm.utils.atomic_io import explain_write_errors, file_digest
from fpgm.utils.progress import Progress
from fpgm.utils.text import reason

TIMEOUT_SECONDS = 6.0
"""Timeout for connecting and between blocks; downloads resume, so it can be short."""
ATTEMPTS = 4
"""How often an interrupted download is resumed."""


class Unavailable(Exception):  # noqa: N818  (not an error yet: another source may work)
    """A source cannot provide the file; the message is only the reason."""


def download(url: str, file: Path, md5: str, progress: Progress) -> None:
    """Download a file; a later call resumes from `file.part` if this one is interrupted."""
    part = file.with_name(f"{file.name}.part")
    for _ in range(ATTEMPTS):
        missing = _receive(url, part, progress)
        if not missing:
            break
    else:
        raise Unavailable(f"ended {missing:,} bytes early, run again to resume")
    with explain_write_errors(file):
        digest = file_digest(part, hashlib.md5(usedforsecurity=False))
        if digest != md5:
            part.unlink()
            raise Unavailable(
                f"sent a file that is not {file.name}: its MD5 is {digest}, not {md5}"
            )
        part.replace(file)


@contextmanager
def npm_pack(package: str, folder: Path) -> Iterator[Path]:
    """Download a package's archive with npm to a temporary folder; no script is run."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("not installed")
    place = folder / ".npm-pack"
    shutil.rmtree(place, ignore_errors=True)  # a process that was killed may have left it
    with explain_write_errors(place):
        place.mkdir()
    # By default npm retries after 10 and 60 seconds, too long if there is no network.
    quick = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000")
    try:
        done = subprocess.run(
            [npm, "pack", package, "--ignore-scripts", "--loglevel=error", *quick],
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        packed = next(place.glob("*.tgz"), None)
        if done.returncode or packed is None:
            raise Unavailable(_npm_reason(done.stderr))
        yield packed
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _receive(url: str, part: Path, progress: Progress) -> int:
    """Append the missing bytes to `part`; return how many are still missing."""
    have = part.stat().st_size if part.exists() else 0
    response = _open_url(url, have)
    if response is None:
        return 0
    with response:
        if response.status != 206:  # a server without range requests starts again
            have = 0
        length = response.headers["Content-Length"]
        total = have + int(length) if length else 0
        with explain_write_errors(part), part.open("ab" if have else "wb") as stream:
            progress("downloading", have, total)
            while block := _read_block(response):
                stream.write(block)
                have += len(block)
                progress("downloading", have, total)
    return max(total - have, 0)


def _open_url(url: str, have: int) -> HTTPResponse | None:
    """Open the URL; None if the server says that nothing comes after the first `have` bytes."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == 416:
            return None
        raise Unavailable(f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise Unavailable(reason(error)) from error
    return response


def _read_block(response: HTTPResponse) -> bytes:
    """Read a block; no bytes if the connection broke, which the length reveals."""
    try:
        return response.read(1 << 18)
    except (OSError, HTTPException):
        return b""


def _npm_reason(complaint: str) -> str:
    """Return npm's error code, or else the first line of its output."""
    code = re.search(r"^npm (?:error|ERR!) code (\S+)$", complaint, re.MULTILINE)
    first_line = complaint.strip().partition("\n")[0].rstrip(".")
    return f"npm pack ended with {code[1] if code else first_line or 'nothing packed'}"
