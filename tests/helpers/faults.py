"""The command line in processes of its own that are made quickly, so that they may be maltreated.

One process imports everything and forks for each command. What a command says goes to files.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

_COMMAND_LINE = """
import contextlib, importlib
from fpgm.cli import app
for late in ("torch._dynamo", "sklearn.datasets", "fpgm.report.charts.image_files", "altair",
             "jinja2", "fpgm.training.trainer"):
    with contextlib.suppress(ImportError):
        importlib.import_module(late)
"""
_ONLY_TORCH = """
import torch._dynamo
app = int  # nothing more than what comes before it
"""
_SERVER = """
import json, os, signal, sys, traceback
import torch
torch.set_num_threads(1)

def obey(order):
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for handle, name in enumerate((os.devnull, order["out"], order["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), handle)
    sys.stdin, sys.stdout, sys.stderr = (
        open(handle, mode, closefd=False) for handle, mode in enumerate("rww")
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["fpgm", *order["args"]]
    code = 1
    try:
        exec(order["before"], {"__name__": "before"})
        app()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:  # to take all of torch apart would take seconds
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
    else:
        answer = os.fork()
        if not answer:
            obey(order)
    print(answer, flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """What came of a command: its code, or minus the signal that ended it."""

    code: int
    out: str
    err: str

    def line(self) -> str:
        """The one line that a command which could not do it leaves."""
        assert self.code not in (0, 1), self
        assert self.err.startswith("fpgm: "), self
        assert self.err.count("\n") == 1, self
        return self.err.removeprefix("fpgm: ").rstrip("\n")


class Server:
    """Forks a process for each command."""

    def __init__(self, imports: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", imports + _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._folder = TemporaryDirectory()
        self._count = 0
        atexit.register(self.close)

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._server.communicate()
        self._folder.cleanup()

    def ask(self, order: Mapping[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def files(self) -> tuple[Path, Path]:
        self._count += 1
        out, err = (Path(self._folder.name) / f"{self._count}.{end}" for end in ("out", "err"))
        for file in (out, err):
            file.touch()  # a process may be killed before it opens them
        return out, err


@cache
def _server(imports: str) -> Server:
    return Server(imports)


class Command:
    """A command under way."""

    def __init__(
        self,
        *args: object,
        cwd: Path | str = "/",
        env: Mapping[str, str] | None = None,
        before: str = "",
        imports: str = _COMMAND_LINE,
    ) -> None:
        self._server = _server(imports)
        self._out, self._err = self._server.files()
        self.pid = self._server.ask(
            {
                "args": [str(item) for item in args],
                "cwd": str(cwd),
                "env": dict(os.environ if env is None else env),
                "before": before,
                "out": str(self._out),
                "err": str(self._err),
            }
        )

    def said(self) -> str:
        """On standard error, so far."""
        return self._err.read_text()

    def send(self, number: signal.Signals) -> None:
        """Send it and its own processes a signal, as a terminal does."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self) -> Ended:
        """Wait for its end."""
        code = self._server.ask({"wait": self.pid})
        return Ended(code, self._out.read_text(), self._err.read_text())


def command(*args: object, **where: Any) -> Ended:
    """A command to its end."""
    return Command(*args, **where).end()


def python(code: str, folder: Path, env: Mapping[str, str] | None = None) -> Ended:
    """A program to its end, in a process that has imported torch and nothing of this package."""
    return command(cwd=folder, env=env, before=code, imports=_ONLY_TORCH)


def two_processes(*args: object, **where: Any) -> list[Ended]:
    """A command in two processes that know of each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port)}  # fmt: skip
    running = [
        Command(*args, env={**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank}, **where)
        for rank in "01"
    ]
    return [item.end() for item in running]


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something is so."""
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)


def inside(folder: Path) -> dict[str, bytes | None]:
    """All files below a folder with their contents, and folders with none."""
    return {
        str(item.relative_to(folder)): item.read_bytes() if item.is_file() else None
        for item in sorted(folder.rglob("*"))
    }


def mostly_swept(names: Iterable[str], quick: Container[str]) -> list[Any]:
    """Parameters of a test, of which some are tried every time and all in the long run."""
    return [
        pytest.param(item, marks=() if item in quick else pytest.mark.sweep, id=item)
        for item in names
    ]


CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree")
"""What a process does to a disk, as Python's own audit tells it, before it is done."""


def kills_at(number: int, folder: Path) -> str:
    """Code that ends its process before the so-manieth change to a folder; 0: never, but counts.

    `open` counts only for writing.
    """
    return f"""
import os, signal, sys
count = 0
def heard(event, args):
    global count
    if event not in {CHANGES!r} or not str(args[0]).startswith({str(folder)!r}):
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & os.O_ACCMODE):
        return
    count += 1
    if count == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(heard)
"""


@contextmanager
def forked(action: Callable[[], object], before: str = "") -> Iterator[int]:
    """The code that an action ends with in a copy of this process; for plain file work only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads take no part in this
        pid = os.fork()
    if not pid:
        code = 1
        try:
            exec(before, {})
            action()
            code = 0
        finally:
            os._exit(code)
    yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def mount(folder: Path, options: str) -> str | None:
    """Mount a small file system, or say why that cannot be done."""
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            check=True,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    return None


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)
