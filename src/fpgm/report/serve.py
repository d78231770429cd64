"""A report that follows a run while it goes on: a server for this machine only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fpgm.errors import FpgmError
from fpgm.report import page
from fpgm.report.run import read_run

HOST = "127.0.0.1"
WATCHED = (
    "results.json", "plan.json", "analysis.json", "sensitivity.json", "bench.json",
    "metrics.jsonl", "recipe.json",
)  # fmt: skip


def server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server for one folder; port 0 takes any that is free. The caller runs and closes it."""
    read_run(folder)  # refuse at once what is no run

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (HOST, "localhost"):  # a name that someone else made lead here
                self._say(403, "text/plain", "Ask for 127.0.0.1.")
            elif self.path in ("/", "/index.html"):
                self._told(lambda: page(read_run(folder), live=True), "text/html")
            elif self.path == "/version":
                self._told(lambda: version(folder), "text/plain")
            else:
                self._say(404, "text/plain", "There is only one page.")

        def _told(self, make: Callable[[], str], kind: str) -> None:
            try:
                self._say(200, kind, make())
            except FpgmError as error:
                self._say(500, "text/plain", str(error))

        def _say(self, code: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Requests are not worth a line each."""

    return ThreadingHTTPServer((HOST, port), Handler)


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
