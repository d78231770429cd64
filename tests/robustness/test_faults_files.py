"""Files that are not what they should be, wherever a command takes one: one line, and no code."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.faults import mostly_swept
from tests.helpers.shell import refused, run
from typer.testing import CliRunner

from fpgm.cli import app
from fpgm.errors import FileError
from fpgm.training.recipe import read_recipe
from fpgm.utils import safe_read as reading
from fpgm.utils.safe_read import read_bytes, read_json, read_text

LOOK = ("--data", "digits", "--images", 32)


class Code:
    """Would make a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_such_a_pickle_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Code(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small"
    run(
        "prune", "digits", "--rate", 0.4, "--recover", "norms", *LOOK, "--test", 32, "--out", folder
    )
    return folder


def make(kind: str, file: Path, small: Path) -> None:
    """A file of a kind that no command can use."""
    tensors = (small / "small.safetensors").read_bytes()
    contents: dict[str, bytes] = {
        "empty": b"",
        "noise": random.Random(0).randbytes(5000),
        "pickle": pickle.dumps(Code(file.with_name("mark"))),
        "old pickle": pickle.dumps(Code(file.with_name("mark")), 0),
        "cut tensors": tensors[: len(tensors) // 2],
        "tensors of endless names": (2**62).to_bytes(8, "little") + b"{" + bytes(100),
        "cut JSON": (small / "results.json").read_bytes()[:200],
        "deep JSON": b"[" * 200_000,
        "deep objects": b'{"format":' * 100_000,
        "deep TOML": b"a = " + b"[" * 20_000,
        "a huge number": b'{"format": 1' + b"0" * 5000 + b"}",
        "a list": b"[1, 2]",
        "another alphabet": '{"a": 1}'.encode("utf-16"),
        "a page": b"<html></html>",
    }
    if kind == "zip of a pickle":
        torch.save({"a": Code(file.with_name("mark"))}, file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind in ("loop", "/dev/zero"):
        file.symlink_to(file if kind == "loop" else kind)
    else:
        file.write_bytes(contents[kind])


KINDS = (
    "empty", "noise", "pickle", "old pickle", "zip of a pickle", "cut tensors", "cut JSON",
    "tensors of endless names", "deep JSON", "deep objects", "deep TOML", "a huge number", "a list",
    "another alphabet", "a page", "folder", "pipe", "loop", "/dev/zero",
)  # fmt: skip


OFTEN = ("zip of a pickle", "deep JSON", "pipe", "loop", "/dev/zero")


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """What waits for a pipe, or reads without end, is ended."""

    def late(*_: object) -> None:
        raise AssertionError("it does not come to an end")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)


def taking(file: Path) -> list[tuple[object, ...]]:
    """Every command that takes a file or a folder, with this one."""
    return [
        ("prune", "digits", "--rate", 0.4, "--weights", file, "--out", file.with_name("out")),
        ("prune", "digits", "--rate", 0.4, "--allocate", file, "--out", file.with_name("out")),
        ("analyze", "digits", "--weights", file),
        ("compare", "digits", "--weights", file, *LOOK, "--macs", 0.5,
         "--out", file.with_name("out")),
        ("sensitivity", "digits", "--weights", file, *LOOK),
        ("sensitivity", "digits", *LOOK, "--no-trials", "--no-accuracy", "--out", file),
        ("sensitivity", "digits", "--data", file),
        ("train", file), ("train", file.with_suffix(".toml")), ("train", file.with_suffix(".json")),
        ("inspect", f"{file}:make"), ("inspect", f"{file.with_suffix('.py')}:make"),
        ("verify", file), ("report", file), ("export", file), ("bench", file),
        ("report", "--compare", file, file),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", mostly_swept(KINDS, OFTEN))
def test_wrong_files(kind: str, tmp_path: Path, small: Path) -> None:
    file = tmp_path / "file"
    make(kind, file, small)
    for end in (".toml", ".json", ".py"):
        file.with_suffix(end).symlink_to(file)
    before = sorted(tmp_path.iterdir())
    for args in taking(file):
        line = refused(*args)
        assert str(file) in line or str(args[1]) in line, line
    assert sorted(item for item in tmp_path.iterdir() if item.name != "__pycache__") == before


@pytest.mark.parametrize("kind", mostly_swept(KINDS, OFTEN))
def test_wrong_files_within_a_folder_of_results(kind: str, tmp_path: Path, small: Path) -> None:
    make(kind, tmp_path / "file", small)
    place = tmp_path / "run"
    for name, commands in (
        ("results.json", ("verify", "export", "bench", "report")),
        ("plan.json", ("verify", "report")),
        ("small.safetensors", ("verify", "export", "bench")),
        ("analysis.json", ("report",)),
        ("bench.json", ("report",)),
        ("recipe.json", ("report",)),
        ("environment.json", ("report",)),
        ("sensitivity.json", ("report",)),
    ):
        shutil.copytree(small, place)
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(tmp_path / "file")
        for command in commands:
            assert str(place) in refused(command, place)
        shutil.rmtree(place)
    assert not (tmp_path / "mark").exists()


WRONG = (None, 5, -1, 10**30, "x", "", [], {}, [[]], True, [10**18], ["a"], "../net.py:make")


@pytest.mark.parametrize(
    "key", ["model", "weights", "original_sha256", "input", "format", "small_sha256", "recovery"]
)
def test_values_of_the_wrong_kind(key: str, tmp_path: Path, small: Path) -> None:
    """Any of them is refused in one line, or does not matter."""
    place = tmp_path / "run"
    shutil.copytree(small, place)
    output = json.loads((small / "results.json").read_text())
    wrong = [value for value in WRONG if value != output[key]]
    for value in (*wrong, ...):
        changed = {**output, key: value}
        if value is ...:
            del changed[key]
        (place / "results.json").write_text(json.dumps(changed))
        done = CliRunner().invoke(app, ["verify", str(place)])
        assert isinstance(done.exception, SystemExit | None), (value, done.exception)
        assert done.stderr.count("\n") == (done.exit_code != 0), (value, done.stderr)
        assert done.exit_code or key == "recovery", value


@pytest.mark.sweep
def test_rows_of_the_wrong_type_are_computed_again(tmp_path: Path) -> None:
    args = ("compare", "digits", *LOOK, "--test", 32, "--macs", 0.5, "--methods", "l2", "--json",
            "--out", tmp_path / "rows")  # fmt: skip
    first = json.loads(run(*args)[0])["rows"][0]
    file = tmp_path / "rows" / "l2" / "results.json"
    output = json.loads(file.read_text())
    for key, value in (("method", {}), ("once", "much"), ("notes", [1]), ("tuned", [])):
        file.write_text(json.dumps({**output, "row": {**output["row"], key: value}}))
        again = json.loads(run(*args)[0])["rows"][0]
        assert {**again, "seconds": 0} == {**first, "seconds": 0}


def test_a_recipe_that_builds_on_a_loop(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    (tmp_path / "recipe.toml").write_text('extends = "loop.toml"')
    for name in ("loop", "recipe"):
        with pytest.raises(FileError, match=r"loop\.toml cannot be read: Too many levels"):
            read_recipe(tmp_path / f"{name}.toml")


def test_a_pipe_among_images(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        os.mkfifo(tmp_path / part / "cat" / "it.png")
    line = refused("sensitivity", "resnet20", "--data", tmp_path)
    assert line == f"{tmp_path}/train/cat/it.png is not a readable image: remove it."


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json])
def test_no_more_is_read_than_bearable(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it"
    file.write_text("1" * 100)
    read(file)
    for wrapped in (read_bytes, read_text):
        monkeypatch.setattr(wrapped, "__defaults__", (99,))
    with pytest.raises(OSError, match="it has more than 99 bytes"):
        read(file)


def test_what_a_file_grows_by_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a log that is being written: what was there when one looked."""
    (tmp_path / "it").write_text("old, new")
    monkeypatch.setattr(reading, "regular_file_size", lambda path: 3)
    assert read_text(tmp_path / "it") == "old"


def test_an_input_larger_than_the_machine() -> None:
    for shape in ("1x1x99999999x99999999", "1x1x9x999999999999999999999"):
        assert refused("inspect", "digits", "--input", shape) == (
            f"An input of {shape} is larger than this machine's memory."
        )
