"""Commands under torchrun: the processes divide the work, and one of them prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.helpers.faults import command, two_processes

NET = """
import os
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )

def broken():
    if os.environ.get("RANK") == "1":
        raise OSError("no such device")
    return make()
"""
DATA = ("--data", "synthetic", "--images", 300, "--test", 100)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    file = tmp_path / "net.py"
    file.write_text(NET)
    return file


def fpgm(*args: Any) -> tuple[str, ...]:
    return tuple(map(str, args))


def prune(net: Path, out: Path) -> tuple[str, ...]:
    model = (f"{net}:make", "--input", "1x3x16x16", "--macs", 0.4, "--align", 1)
    return fpgm("prune", *model, "--allocate", "sensitivity", "--recover", "solve", *DATA,
                "--out", out)  # fmt: skip


def same_weights(one: Path, two: Path) -> None:
    first, second = load_file(one / "small.safetensors"), load_file(two / "small.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        gap = float((tensor.double() - second[name].double()).abs().max())
        assert gap <= 1e-6 * max(float(tensor.abs().max()), 1e-6), name


def test_two_processes_write_what_one_writes(net: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone = command(*prune(net, one))
    first, second = two_processes(*prune(net, two))
    assert (alone.code, first.code, second.code) == (0, 0, 0), first.err + second.err
    assert "Written to" in first.out
    assert (second.out, second.err) == ("", "")
    assert {file.name for file in two.iterdir()} == {file.name for file in one.iterdir()}
    same_weights(one, two)
    results = [json.loads((folder / "results.json").read_text()) for folder in (one, two)]
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert results[0]["recovery"]["inputs"] == results[1]["recovery"]["inputs"] == 384
    again = ("--model", f"{net}:make", "--method", "norms", *DATA)
    alone = command(*fpgm("recover", one, *again))
    first, second = two_processes(*fpgm("recover", two, *again))
    assert (alone.code, first.code, second.code) == (0, 0, 0), first.err + second.err
    assert first.out.splitlines()[0] == alone.out.splitlines()[0]
    assert (second.out, second.err) == ("", "")
    same_weights(one, two)


def test_sensitivity_is_written_once(net: Path, tmp_path: Path) -> None:
    file = tmp_path / "sensitivity.json"
    model = (f"{net}:make", "--input", "1x3x16x16")
    first, second = two_processes(*fpgm("sensitivity", *model, *DATA[:4], "--out", file))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "Accuracy on the same inputs" in first.out
    assert (second.out, second.err) == ("", "")
    # One process finds it complete, and measured on the same inputs.
    assert command(*fpgm("sensitivity", *model, *DATA[:4], "--out", file)).out == first.out


def test_an_error_of_one_process_ends_both(net: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = (f"{net}:broken", "--input", "1x3x16x16", "--rate", 0.5)
    first, second = two_processes(*fpgm("prune", *model, "--out", out))
    assert (first.code, second.code) == (2, 2)
    assert first.err.startswith("fpgm: Rank 1 failed: ")
    assert "no such device" in first.err
    assert second.err == ""
    assert not out.exists()


def test_a_folder_in_use_is_refused_once(net: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    first, second = two_processes(*prune(net, tmp_path))
    assert (first.code, second.code) == (2, 2)
    assert first.err.count("\n") == 1
    assert "is not empty" in first.err
    assert second.err == ""


def test_other_commands_run_once() -> None:
    first, second = two_processes(*fpgm("inspect", "digits"))
    assert (first.code, second.code) == (0, 0)
    assert "| group" in first.out
    assert second.out == ""
    assert second.err.startswith("fpgm: inspect runs in the first process only")
