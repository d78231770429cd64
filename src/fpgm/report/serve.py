"""A report that follows a run while it goes on: a server for this machine only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fpgm.errors import FpgmError
from fpgm.report.page import page
from fpgm.report.run import read_run

HOST = "127.0.0.1"
WATCHED = (
    "results.json", "plan.json", "analysis.json", "sensitivity.json", "bench.json",
    "metrics.jsonl", "recipe.json", "environment.json",
)  # fmt: skip


def server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server for one folder; port 0 takes any that is free. The caller runs and closes it."""
    read_run(folder)  # refuse at once what is no run

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not _is_own(self.headers.get("Host") or "", running.server_address[1]):
                self._say(403, "text/plain", "Ask for 127.0.0.1.")
            elif self.path in ("/", "/index.html"):
                self._told(lambda: live_page(folder), "text/html")
            elif self.path == "/version":
                self._told(lambda: version(folder), "text/plain")
            else:
                self._say(404, "text/plain", "There is only one page.")

        def _told(self, make: Callable[[], str], kind: str) -> None:
            try:
                code, text = 200, make()
            except FpgmError as error:
                code, kind, text = 500, "text/plain", str(error)
            self._say(code, kind, text)

        def _say(self, code: int, kind: str, text: str) -> None:
            content = text.encode("utf-8", "replace")
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if code == 500:  # a file may be whole a moment later
                self.send_header("Refresh", "2")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Requests are not worth a line each."""

    running = ThreadingHTTPServer((HOST, port), Handler)
    return running


def live_page(folder: Path) -> str:
    """The page with the version it is of, which is looked up first: what changes after is newer."""
    known = version(folder)
    return page(read_run(folder), live=known)


def version(folder: Path) -> str:
    """A text that changes when a file does from which the page is made."""
    found = hashlib.sha256()
    for name in WATCHED:
        try:
            about = (folder / name).stat()
        except OSError:
            continue
        found.update(f"{name} {about.st_mtime_ns} {about.st_size}".encode())
    return found.hexdigest()[:16]


def _is_own(host: str, port: int) -> bool:
    """Whether a request names this machine, and not something that was made to lead here.

    >>> _is_own("LocalHost", 8765), _is_own("127.0.0.1:8765", 8765), _is_own("evil.example", 8765)
    (True, True, False)
    """
    name, _, number = host.lower().partition(":")
    return name in (HOST, "localhost") and number in ("", str(port))
