"""Killing a run changes nothing, and many processes are one."""

from __future__ import annotations

import json
import resource
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.faults import Command, command, two_processes, until
from tests.helpers.runs import (
    finish,
    logged,
    recipe,
    same,
    weights,
    write_net,
    write_recipe,
)
from tests.helpers.shell import run as in_shell
from torch import nn

import fpgm
from fpgm.errors import FileError
from fpgm.models.registry import load_model
from fpgm.training import train
from fpgm.training import trainer as engine
from fpgm.training.checkpoints import Checkpoints


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_weights(tiny: str, tmp_path: Path) -> None:
    """Batch norm, dropout, momentum, an average, held units, data order: all go on exactly."""
    file = write_recipe(tmp_path, tiny)
    assert command(*training(file, tmp_path / "calm")).code == 0
    metrics, kills = tmp_path / "run/metrics.jsonl", 0

    def reached(epochs: int) -> bool:
        return metrics.exists() and len(metrics.read_text().splitlines()) >= epochs

    for epochs, delay in ((1, 0.0), (2, 0.03), (4, 0.11), (6, 0.2), (8, 0.0)):
        running = Command(*training(file, tmp_path / "run"))
        until(partial(reached, epochs), 120)
        time.sleep(delay)
        running.send(signal.SIGKILL)
        kills += running.end().code == -signal.SIGKILL
    assert kills >= 3
    assert command(*training(file, tmp_path / "run")).code == 0
    assert same(weights(tmp_path / "calm"), weights(tmp_path / "run"))
    assert [item["epoch"] for item in logged(tmp_path / "run")] == list(range(1, 9))


def training(file: Path, out: Path) -> tuple[object, ...]:
    return ("train", file, "--allow-code", "--out", out)


def test_resuming_in_the_same_process_is_exact(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "REPORT_SECONDS", -1.0)  # tell of every step

    class Stopper:
        def on_epoch_start(self, *_: Any) -> None: ...

        def on_step(self, epoch: int, step: int, figures: dict[str, float]) -> None:
            if (epoch, step) == (2, 3):
                raise KeyboardInterrupt

        def on_epoch_end(self, metrics: dict[str, Any]) -> None: ...

    wanted = recipe(tiny, train={"epochs": 4, "ema": 0.9})
    train(wanted, tmp_path / "calm")
    with pytest.raises(KeyboardInterrupt):
        train(wanted, tmp_path / "run", Stopper())
    train(wanted, tmp_path / "run")
    assert same(weights(tmp_path / "calm"), weights(tmp_path / "run"))


def test_a_damaged_checkpoint_is_passed_over(tiny: str, tmp_path: Path) -> None:
    wanted = recipe(tiny)
    train(wanted, tmp_path / "run")
    before = weights(tmp_path / "run")
    files = sorted((tmp_path / "run/checkpoints").glob("*.pt"))
    assert [f.name for f in files] == ["epoch-00002.pt", "epoch-00003.pt"]
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 1
    files[-1].write_bytes(data)
    for name in ("results.json", "small.safetensors"):
        (tmp_path / "run" / name).unlink()
    state = Checkpoints(tmp_path / "run/checkpoints").load_newest()
    assert state is not None
    assert state["epoch"] == 2
    train(wanted, tmp_path / "run")
    assert same(before, weights(tmp_path / "run"))


def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, {"epoch": 1, "weights": torch.ones(100)})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(FileError) as caught:
            checkpoints.save(2, {"epoch": 2, "weights": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == (
        f"The checkpoint {tmp_path}/run/epoch-00002.pt cannot be written: File too large. The last "
        "one is intact: make room and start again to resume from it."
    )
    state = checkpoints.load_newest()
    assert state is not None
    assert state["epoch"] == 1
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "epoch-00001.json",
        "epoch-00001.pt",
    ]


def test_checkpoints_are_in_order(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for epoch in (99_999, 100_000):
        checkpoints.save(epoch, {"epoch": epoch})
    state = checkpoints.load_newest()
    assert state is not None
    assert state["epoch"] == 100_000


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json"])
def test_what_cannot_be_written_is_named(tiny: str, tmp_path: Path, name: str) -> None:
    """A folder of that name is in the way."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.json").touch()
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(FileError) as caught:
        train(recipe(tiny, train={"epochs": 1}), tmp_path / "run")
    assert str(caught.value) == f"{tmp_path}/run/{name} cannot be written: Is a directory."


def torchrun(*options: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    """The same global batch, cut in two: the same units, and the same weights to rounding."""
    file = write_recipe(tmp_path, write_net(tmp_path, "", 0.0), epochs=4)
    assert command(*training(file, tmp_path / "one")).code == 0
    for ended in two_processes(*training(file, tmp_path / "two")):
        assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "two/environment.json").read_text())["processes"] == 2
    plans = [fpgm.Plan.from_json((tmp_path / n / "plan.json").read_text()) for n in ("one", "two")]
    assert plans[0].cuts == plans[1].cuts
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_unused_weights_do_not_stop_two_processes(tmp_path: Path) -> None:
    model = write_net(tmp_path, "", 0.0)
    with (tmp_path / "tiny.py").open("a") as net:
        net.write(
            """
class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = make(), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)
"""
        )
    file = write_recipe(tmp_path, model.replace(":make", ":Spare"), epochs=1)
    for ended in two_processes(*training(file, tmp_path / "run")):
        assert ended.code == 0, ended.err
    assert "spare.weight" in weights(tmp_path / "run")


@pytest.mark.slow
def test_processes_that_met_end_before_the_interpreter_is_taken_down(
    tiny: str, tmp_path: Path
) -> None:
    """Threads of torch's may abort what ends later, so what would always abort it is put there."""
    with Path(tiny.partition(":")[0]).open("a") as net:
        net.write(
            f"""
import atexit, os, pathlib

def last():
    print("that was all", end="")  # a handler is still called, and heard
    pathlib.Path({str(tmp_path)!r}, "left " + os.environ["RANK"]).touch()

class Late:
    def __del__(self, abort=os.abort):
        abort()

atexit.register(last)
late = Late()
"""
        )
    output = finish(write_recipe(tmp_path, tiny, epochs=1), tmp_path / "run", *torchrun())
    assert output.count("that was all") == 2
    assert sorted(path.name for path in tmp_path.glob("left *")) == ["left 0", "left 1"]


def test_a_process_without_a_group_returns_normally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may say that there are others to processes that never meet them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert in_shell("--version")[0].startswith("fpgm ")  # and this test goes on


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_continues(tiny: str, tmp_path: Path) -> None:
    """One of two processes dies once in its third epoch; the launcher starts both again."""
    (tmp_path / "fatal.py").write_text(
        Path(tiny.partition(":")[0]).read_text()
        + f"""
import os, pathlib, signal
flag = pathlib.Path({str(tmp_path)!r}) / "died"

class Fatal(nn.Identity):
    calls = 0

    def forward(self, x):
        if self.training:
            Fatal.calls += 1
            if Fatal.calls == 80 and os.environ.get("RANK") == "1" and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return x

def fatal():
    return nn.Sequential(Fatal(), *make())
"""
    )
    file = write_recipe(tmp_path, f"{tmp_path}/fatal.py:fatal", epochs=4)
    output = finish(file, tmp_path / "run", *torchrun("--max-restarts", "1"))
    assert (tmp_path / "died").exists()
    assert "resuming after epoch 2 of 4" in output
    epochs = [metrics["epoch"] for metrics in logged(tmp_path / "run")]
    assert epochs == [1, 2, 3, 4]


def test_the_net_of_these_tests_has_what_makes_resuming_hard(tiny: str) -> None:
    kinds = {type(module) for module in load_model(tiny).modules()}
    assert {nn.BatchNorm2d, nn.Dropout} <= kinds
