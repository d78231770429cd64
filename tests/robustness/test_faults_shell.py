"""What shells and terminals do to a command: Ctrl-C, closed pipes, other alphabets, no terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from threading import Thread

import pytest
from tests.helpers.faults import Command, command, inside, mostly_swept, until
from tests.helpers.runs import write_net, write_recipe
from tests.helpers.shell import run

import _fpgm

LOOK = ("--data", "digits", "--images", 32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small"
    run("prune", "digits", "--rate", 0.4, "--out", folder)
    return folder


SLOWLY = """
import importlib, time
from pathlib import Path
def told(place, name):
    owner = importlib.import_module(place)
    real = getattr(owner, name)
    def slow(*args, **options):
        Path({mark!r}).touch()
        time.sleep(600)
        return real(*args, **options)
    setattr(owner, name, slow)
told({place!r}, {name!r})
"""
"""Stops where something long is done, and says that it is there."""

LONG: dict[str, tuple[str, str]] = {
    "prune": ("fpgm.workflow.pipeline", "compact_certified"),
    "recover": ("fpgm.recovery.api", "_solve_"),
    "write": ("os", "fsync"),
    "sensitivity": ("fpgm.recovery.sensitivity.runner", "error_curve"),
    "bench": ("fpgm.latency.benchmark", "time_interleaved"),
    "report": ("fpgm.cli.report", "write_report"),
    "export": ("fpgm.exporters.api", "simplify"),
    "analyze": ("fpgm.report.charts.image_files", "_render"),
    "compare": ("fpgm.cli.compare", "run_one"),
    "train": ("fpgm.training.trainer", "evaluate_accuracy"),
}


def long_command(name: str, small: Path, place: Path) -> tuple[object, ...]:
    prune = ("prune", "digits", "--rate", 0.4, "--out", place / "it")
    return {
        "prune": prune,
        "recover": (*prune, "--recover", "solve", *LOOK),
        "write": prune,
        "sensitivity": ("sensitivity", "digits", *LOOK, "--out", place / "it"),
        "bench": ("bench", small, "--backend", "eager", "--keep"),
        "report": ("report", small, "--out", place / "it"),
        "export": ("export", small, "--to", "torchscript", "--out", place / "it"),
        "analyze": ("analyze", "digits", "--figures", place / "it"),
        "compare": ("compare", "digits", *LOOK, "--macs", 0.5, "--methods", "l2",
                    "--out", place / "it"),
        "train": ("train", place.parent / "recipe.toml", "--allow-code", "--out", place / "it"),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    "name", mostly_swept(LONG, ("prune", "recover", "write", "sensitivity", "bench", "train"))
)
def test_ctrl_c(name: str, tmp_path: Path, small: Path) -> None:
    """One line, the code that shells know, nothing half-written."""
    write_recipe(tmp_path, write_net(tmp_path, "", 0.0), epochs=2)
    place, mark = tmp_path / "place", tmp_path / "mark"
    place.mkdir()
    before = inside(small)
    owner, function = LONG[name]
    code = SLOWLY.format(mark=str(mark), place=owner, name=function)
    running = Command(*long_command(name, small, place), before=code)
    until(mark.exists)
    running.send(signal.SIGINT)
    ended = running.end()
    assert ended.code == 130
    assert ended.err.splitlines()[-1].startswith("fpgm: stopped")
    assert "Traceback" not in ended.err
    if name != "train":
        assert ended.line() == "stopped."
    assert inside(small) == before
    left = [item for item in inside(place) if item not in LEFT.get(name, ())]
    assert left == []


LEFT = {
    "compare": ("it", "it/asked.json"),
    "train": ("it", "it/recipe.json", "it/environment.json", "it/metrics.jsonl"),
}
"""What is gone on with the next time."""


SLOW_TO_IMPORT = """
import time
from pathlib import Path
Path({mark!r}).touch()
while True:
    try:
        time.sleep(600)
    except BaseException:
        pass
"""
"""In the place of torch, which takes seconds, and some of whose parts swallow exceptions."""


@pytest.mark.parametrize("heard", [True, False])
def test_ctrl_c_before_anything_is_imported(heard: bool, tmp_path: Path) -> None:
    """Commands in a shell's background do not hear it, and these tests may be such commands."""
    mark = tmp_path / "mark"
    (tmp_path / "torch.py").write_text(SLOW_TO_IMPORT.format(mark=str(mark)))
    ear = "default_int_handler" if heard else "SIG_IGN"
    begin = f"import signal; signal.signal(signal.SIGINT, signal.{ear}); "
    with subprocess.Popen(
        [sys.executable, "-c", f"{begin}from _fpgm import main; main()", "inspect", "digits"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        try:
            until(mark.exists)
            running.send_signal(signal.SIGINT)
            if not heard:
                time.sleep(0.1)
                assert running.poll() is None
                running.kill()
            _, err = running.communicate(timeout=30)
        finally:
            running.kill()
    assert (running.returncode, err) == ((130, "fpgm: stopped.\n") if heard else (-9, ""))


def test_the_command_begins_there() -> None:
    (script,) = entry_points(group="console_scripts", name="fpgm")
    assert script.load() is _fpgm.main


def test_ctrl_c_ends_workers_too(tmp_path: Path) -> None:
    """Folders of images are read by processes of their own."""
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        for number in range(8):
            image.new("RGB", (40, 40)).save(tmp_path / part / "cat" / f"{number}.png")
    mark = tmp_path / "mark"
    running = Command(
        "sensitivity", "resnet20", "--data", tmp_path,
        before=SLOWLY.format(mark=str(mark), place="fpgm.data.image_folder", name="_next_batch"),
    )  # fmt: skip
    until(mark.exists)
    workers = [pid for pid in group(running.pid) if pid != str(running.pid)]
    assert workers
    # One that is interrupted while it imports would print a traceback.
    assert [pid for pid in workers if not blocks_interrupts(pid)] == []
    running.send(signal.SIGINT)
    ended = running.end()
    assert (ended.code, ended.line()) == (130, "stopped.")
    until(lambda: not group(running.pid), 30)


def blocks_interrupts(pid: str) -> bool:
    """Whether SIGINT never reaches a process."""
    (mask,) = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def group(leader: int) -> list[str]:
    """Processes of a session that still live."""
    output = subprocess.run(
        ["ps", "-s", str(leader), "-o", "pid="], capture_output=True, check=False
    )
    return output.stdout.decode().split()


def test_the_bar_disappears_when_it_is_stopped(tmp_path: Path) -> None:
    """On a terminal: the last thing drawn is nothing, and the cursor is back."""
    ours, theirs = pty.openpty()
    owner, function = LONG["prune"]
    code = SLOWLY.format(mark=str(tmp_path / "mark"), place=owner, name=function)
    code += f"""
import os, sys
os.dup2(os.open({os.ttyname(theirs)!r}, os.O_RDWR | os.O_NOCTTY), 2)
sys.stderr = open(2, "w", closefd=False)
"""
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    running = Command(*long_command("prune", tmp_path, tmp_path), before=code, env=env)
    pieces: list[bytes] = []
    reader = Thread(target=lambda: pieces.extend(iter(lambda: read(ours), b"")))
    reader.start()
    until((tmp_path / "mark").exists)
    time.sleep(0.3)  # bars are drawn ten times a second
    running.send(signal.SIGINT)
    assert running.end().code == 130
    os.close(theirs)
    reader.join()
    os.close(ours)
    shown = b"".join(pieces).decode()
    assert "━" in shown
    assert shown.endswith("\x1b[2Kfpgm: stopped.\r\n")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def read(terminal: int) -> bytes:
    """What was written there; nothing once nobody has it open."""
    try:
        return os.read(terminal, 10_000)
    except OSError:
        return b""


def shell(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command as a shell runs it, `fpgm` standing for the tool."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'fpgm() {{ "{sys.executable}" -m fpgm "$@"; }}; {line}'],
        capture_output=True, text=True, errors="replace", check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def test_a_closed_pipe_and_no_terminal() -> None:
    done = shell("fpgm inspect resnet20 | head -c 1; fpgm inspect digits >&-; fpgm inspect no 2>&-")
    assert done.stderr == ""
    assert done.returncode == 2


def test_other_alphabets(small: Path) -> None:
    """Signs that a terminal cannot show are shown as something, not as a traceback."""
    for env in (
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        {"LC_ALL": "C", "PYTHONIOENCODING": "latin-1", "PYTHONCOERCECLOCALE": "0"},
    ):
        done = shell(f"fpgm verify '{small}' && fpgm inspect größe", **env)
        assert done.returncode == 2
        assert done.stderr.startswith("fpgm: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"COLUMNS": "1"}, {}])
def test_terminals(env: dict[str, str]) -> None:
    """What is said is the same whatever the terminal, and has no colors."""
    plain = {key: item for key, item in os.environ.items() if key not in ("TERM", "COLUMNS")}
    ended = command("inspect", "digits", env={**plain, **env})
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == run("inspect", "digits")[0]
    assert "\x1b" not in ended.out
