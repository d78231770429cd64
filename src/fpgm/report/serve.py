"""`fpgm report --serve`: a local HTTP server whose page reloads when the run folder changes.

It listens on 127.0.0.1 only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fpgm.errors import FpgmError
from fpgm.report.page import render_page
from fpgm.report.run import read_run
from fpgm.utils.run_files import REPORTED

HOST = "127.0.0.1"


def create_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Create a server for one run folder; the caller starts and closes it.

    Args:
        folder: a run folder; `FileError` if it is none.
        port: 0 takes any free port.
    """
    read_run(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not _is_local_host(self.headers.get("Host") or "", http_server.server_address[1]):
                self._send(403, "text/plain", "Open http://127.0.0.1 instead.")
            elif self.path in ("/", "/index.html"):
                self._send_result(lambda: render_live_page(folder), "text/html")
            elif self.path == "/version":
                self._send_result(lambda: folder_version(folder), "text/plain")
            else:
                self._send(404, "text/plain", "Not found: the report is at /.")

        def _send_result(self, render: Callable[[], str], kind: str) -> None:
            try:
                code, text = 200, render()
            except FpgmError as error:
                code, kind, text = 500, "text/plain", str(error)
            self._send(code, kind, text)

        def _send(self, code: int, kind: str, text: str) -> None:
            content = text.encode("utf-8", "replace")
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if code == 500:  # a file may be complete a moment later
                self.send_header("Refresh", "2")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    http_server = ThreadingHTTPServer((HOST, port), Handler)
    return http_server


def render_live_page(folder: Path) -> str:
    """Render the page together with the version of its folder.

    The version is computed before the files are read, so that a later change leads to a reload.
    """
    version = folder_version(folder)
    return render_page(read_run(folder), live=version)


def folder_version(folder: Path) -> str:
    """Hash the names, times and sizes of the files that the page is rendered from."""
    digest = hashlib.sha256()
    for name in REPORTED:
        try:
            info = (folder / name).stat()
        except OSError:
            continue
        digest.update(f"{name} {info.st_mtime_ns} {info.st_size}".encode())
    return digest.hexdigest()[:16]


def _is_local_host(host: str, port: int) -> bool:
    """Check that the Host header names this machine, against DNS rebinding.

    >>> _is_local_host("LocalHost", 8765), _is_local_host("127.0.0.1:8765", 8765)
    (True, True)
    >>> _is_local_host("evil.example", 8765)
    False
    """
    name, _, number = host.lower().partition(":")
    return name in (HOST, "localhost") and number in ("", str(port))
