"""A disk that is full or only read: one line that names the file and why; nothing is left of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.helpers.faults import (
    Command,
    Ended,
    command,
    inside,
    mostly_swept,
    mount,
    unmount,
    until,
)
from tests.helpers.runs import write_net, write_recipe
from tests.helpers.shell import refused, run

from fpgm.utils.atomic_io import create_folder

LOOK = ("--data", "digits", "--images", 64)
Args = tuple[object, ...]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small"
    run("prune", "digits", "--rate", 0.4, "--out", folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    return write_recipe(tmp_path / "net", write_net(tmp_path / "net", "", 0.0), epochs=1)


COMMANDS: dict[str, Callable[[Path, Path, Path], Args]] = {
    "prune": lambda to, small, recipe: ("prune", "digits", "--rate", 0.4, "--out", to / "new"),
    "prune below": lambda to, small, recipe: (
        "prune", "digits", "--rate", 0.4, "--out", to / "a" / "b"),
    "report": lambda to, small, recipe: ("report", small, "--out", to / "page.html"),
    "report of two": lambda to, small, recipe: (
        "report", "--compare", small, small, "--out", to / "page.html"),
    "sensitivity": lambda to, small, recipe: (
        "sensitivity", "digits", *LOOK, "--no-accuracy", "--no-trials", "--out", to / "it.json"),
    "export": lambda to, small, recipe: (
        "export", small, "--to", "torchscript", "--out", to / "it.pt"),
    "analyze": lambda to, small, recipe: ("analyze", "digits", "--figures", to / "figures"),
    "compare": lambda to, small, recipe: (
        "compare", "digits", *LOOK, "--test", 50, "--macs", 0.5, "--methods", "l2",
        "--out", to / "rows"),
    "train": lambda to, small, recipe: ("train", recipe, "--allow-code", "--out", to / "run"),
    "reproduce": lambda to, small, recipe: (
        "reproduce", "baselines", "--rows", "resnet20", "--out", to / "paper"),
    "data": lambda to, small, recipe: ("data", "cifar10", "--root", to / "data"),
}  # fmt: skip


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write to, root included."""
    folder = tmp_path / "read only"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    if why := mount(folder, "ro,size=64k"):
        pytest.skip(f"root may write anywhere, and nothing can be mounted here: {why}")
    yield folder
    unmount(folder)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_is_only_read(name: str, read_only: Path, small: Path, recipe: Path) -> None:
    args = COMMANDS[name](read_only, small, recipe)
    named = args[-1] if name != "data" else read_only / "data" / "cifar-10-batches-py"
    why = "Permission denied" if os.geteuid() else "Read-only file system"
    line = refused(*args)
    assert line.startswith(str(named))
    assert line.endswith(f" cannot be written: {why}.")
    assert not list(read_only.iterdir())


@pytest.mark.parametrize("name", mostly_swept(COMMANDS, ("prune", "export", "train", "data")))
def test_a_folder_that_is_a_file(name: str, tmp_path: Path, small: Path, recipe: Path) -> None:
    (tmp_path / "file").write_text("mine")
    line = refused(*COMMANDS[name](tmp_path / "file", small, recipe))
    assert str(tmp_path / "file") in line
    assert (tmp_path / "file").read_text() == "mine"


def within(limit: int, *args: object) -> Ended:
    """A command whose files may have so many bytes, which is a full disk that needs no rights."""
    return command(
        *args,
        before="import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))",
    )


LEFT = {"compare": ["rows"], "train": ["run"], "reproduce": ["paper"]}
"""Folders that can be gone on with stay."""


@pytest.mark.parametrize(
    "name",
    mostly_swept([item for item in COMMANDS if item != "data"], ("prune", "export", "train")),
)
def test_no_space(name: str, tmp_path: Path, small: Path, recipe: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    args = COMMANDS[name](place, small, recipe)
    line = within(1000, *args).line()
    assert str(args[-1]) in line
    assert "cannot be written: " in line
    assert "File too large" in line
    assert [item.name for item in place.iterdir()] == LEFT.get(name, [])
    assert not list(place.rglob("*.part"))
    run(*args)


def test_a_disk_that_is_full(tmp_path: Path, small: Path) -> None:
    """The same with a real one: also what is small, and what lies beside its results."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if why := mount(disk, "size=1m"):
        pytest.skip(f"no file system can be mounted here: {why}")
    try:
        run("prune", "digits", "--rate", 0.4, "--out", disk / "small")
        ballast = os.open(disk / "ballast", os.O_WRONLY | os.O_CREAT)
        with suppress(OSError):
            while os.write(ballast, bytes(4096)):
                pass
        os.close(ballast)
        before = inside(disk)
        for args in (
            ("prune", "digits", "--rate", 0.5, "--out", disk / "small", "--force"),
            ("report", disk / "small"),
            ("bench", disk / "small", "--backend", "eager", "--seconds", 0.02, "--keep"),
            ("export", disk / "small", "--to", "torchscript"),
        ):
            line = refused(*args)
            assert str(disk / "small") in line
            assert "cannot be written: " in line
            assert "No space left on device" in line
            assert inside(disk) == before
    finally:
        unmount(disk)


def test_what_was_there_stays(tmp_path: Path, small: Path) -> None:
    for name in ("report", "export"):
        file = Path(str(COMMANDS[name](tmp_path, small, tmp_path)[-1]))
        file.write_text("old")
        within(1000, *COMMANDS[name](tmp_path, small, tmp_path)).line()
        assert file.read_text() == "old"
    assert not list(tmp_path.rglob("*.part"))


def test_a_device_is_not_replaced(tmp_path: Path, small: Path) -> None:
    """As root, moving a file to /dev/null would take it from everyone."""
    device = tmp_path / "pipe"
    os.mkfifo(device)
    for name in ("report", "export", "sensitivity"):
        args = (*COMMANDS[name](tmp_path, small, tmp_path)[:-1], device)
        assert "it is not a regular file" in refused(*args)
        assert device.is_fifo()
    assert list(tmp_path.iterdir()) == [device]


def test_no_disk_space_for_temporary_inputs() -> None:
    """More of them than memory is given go to temporary files."""
    ended = command(
        "prune", "digits", "--rate", 0.4, "--recover", "norms", "--data", "digits", "--out", "/x",
        before="import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "import fpgm.utils.calibration_data as b; b.MAX_BYTES_IN_MEMORY = 0",
    )  # fmt: skip
    line = ended.line()
    assert line.startswith("Inputs cannot be kept in ")
    assert "File too large" in line
    assert not Path("/x").exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc tells of open files")
def test_temporary_inputs_are_removed_with_a_killed_process(tmp_path: Path) -> None:
    mark, place = tmp_path / "mark", tmp_path / "temporary"
    place.mkdir()
    running = Command(
        "prune", "digits", "--rate", 0.4, "--recover", "solve", "--data", "digits", "--out", "/x",
        env={**os.environ, "TMPDIR": str(place)},
        before=f"""
import time
from pathlib import Path
import fpgm.recovery.api as recovery, fpgm.utils.calibration_data as batches
batches.MAX_BYTES_IN_MEMORY = 0
def slow(*args, **options):
    Path({str(mark)!r}).touch()
    time.sleep(600)
recovery._solve_ = slow
""",
    )  # fmt: skip
    until(mark.exists)
    links = [str(item.readlink()) for item in Path(f"/proc/{running.pid}/fd").iterdir()]
    assert [item for item in links if item.startswith(str(place))]
    running.send(signal.SIGKILL)
    assert running.end().code == -9
    assert list(place.iterdir()) == []


def test_parent_folders_created_in_vain_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def full(path: Path, *rest: int) -> None:
        if Path(path).name == "c" and Path(path).parent.exists():
            raise OSError(28, "No space left on device")
        make(path, *rest)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="No space"), create_folder(tmp_path / "a" / "b" / "c"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_or_space_for_output() -> None:
    ended = command(
        "inspect",
        "digits",
        before="""
import os
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
""",
    )
    assert ended.line() == "No space left on device."
