"""The engine: what a run leaves behind, that killing it changes nothing, and that many are one."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.data.batches import Share
from fpgm.errors import FileError, ModelError, RequestError
from fpgm.models.spec import load_model
from fpgm.models.weights import read_weights
from fpgm.train import Recipe, read_recipe, train
from fpgm.train.checkpoints import Checkpoints
from fpgm.train.engine import _open_data
from fpgm.train.recipe import make_recipe

TINY = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), {norm}nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout({dropout}), nn.Linear(64, 10),
    )
"""
BASE: dict[str, Any] = {
    "data": {"name": "synthetic", "batch": 32},
    "train": {"epochs": 3, "lr": 0.1, "momentum": 0.9},
    "prune": {"rate": 0.4, "align": 1},
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A small network with batch norm and dropout, by the path of its file."""
    return write_net(tmp_path, "nn.BatchNorm2d(16), ", 0.2)


def write_net(folder: Path, norm: str, dropout: float) -> str:
    file = folder / "tiny.py"
    file.write_text(TINY.format(norm=norm, dropout=dropout))
    return f"{file}:make"


def recipe(model: str, **parts: Any) -> Recipe:
    """The base recipe with some options replaced; a part that is None is left out."""
    table = {"model": {"name": model}, **BASE}
    for part, options in parts.items():
        table[part] = {**table.get(part, {}), **options} if isinstance(options, dict) else options
    return make_recipe({k: v for k, v in table.items() if v is not None})


def weights(folder: Path, name: str = "small.safetensors") -> dict[str, Tensor]:
    return read_weights(folder / name)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# What a run leaves behind.


def test_a_run_folder_holds_everything(tiny: str, tmp_path: Path) -> None:
    outcome = train(recipe(tiny), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "recipe.json", "environment.json", "metrics.jsonl", "results.json", "checkpoints",
        "plan.json", "small.safetensors", "tensorboard",
    }  # fmt: skip
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert {"git", "command", "python", "processes"} <= environment.keys()
    metrics = logged(tmp_path / "run")
    assert [m["epoch"] for m in metrics] == [1, 2, 3]
    assert metrics[0]["zeroed"] == 12  # 6 of 16 in both layers
    assert any((tmp_path / "run/tensorboard").iterdir())
    plan = fpgm.Plan.from_json((tmp_path / "run/plan.json").read_text())
    assert plan.params_after == outcome.results["params_after"]
    assert sum(p.numel() for p in outcome.model.parameters()) == plan.params_after


def test_the_compact_model_on_disk_is_the_one_that_was_measured(tiny: str, tmp_path: Path) -> None:
    outcome = train(recipe(tiny), tmp_path / "run")
    again = fpgm.load(tmp_path / "run/small.safetensors", lambda: load_model(tiny))
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), outcome.model.eval()(x))
    assert outcome.results["accuracy"] == outcome.results["masked_accuracy"]


def test_training_learns_and_the_seed_decides_everything(tiny: str, tmp_path: Path) -> None:
    plain = recipe(tiny, prune=None, train={"epochs": 12})
    outcome = train(plain, tmp_path / "a")
    assert outcome.results["accuracy"] > 0.9
    train(plain, tmp_path / "b")
    a, b = (weights(tmp_path / name, "weights.safetensors") for name in "ab")
    assert same(a, b)
    train(recipe(tiny, prune=None, train={"epochs": 12}, seed=1), tmp_path / "c")
    assert not same(a, weights(tmp_path / "c", "weights.safetensors"))


def test_a_finished_run_is_not_trained_again(tiny: str, tmp_path: Path) -> None:
    first = train(recipe(tiny), tmp_path / "run")
    stamp = (tmp_path / "run/small.safetensors").stat().st_mtime_ns
    again = train(recipe(tiny), tmp_path / "run")
    assert again.results == first.results
    assert (tmp_path / "run/small.safetensors").stat().st_mtime_ns == stamp
    assert len(logged(tmp_path / "run")) == 3


def test_the_recipe_in_a_run_s_folder_is_the_recipe(tiny: str, tmp_path: Path) -> None:
    wanted = recipe(tiny, train={"epochs": 1})
    train(wanted, tmp_path / "run")
    assert read_recipe(tmp_path / "run/recipe.json") == wanted


def test_a_folder_of_another_recipe_is_left_alone(tiny: str, tmp_path: Path) -> None:
    train(recipe(tiny), tmp_path / "run")
    with pytest.raises(FileError) as caught:
        train(recipe(tiny, seed=5), tmp_path / "run")
    assert str(caught.value) == (
        f"{tmp_path}/run holds a run of another recipe (seed was 0, is 5): choose another folder, "
        f"or give the recipe it was started with ({tmp_path}/run/recipe.json)."
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(FileError, match="is there and is no run: choose another folder"):
        train(recipe(tiny), other)
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]


def test_a_recipe_that_cannot_run_leaves_no_folder(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^ignore: no layer matches 'nothing'\."):
        train(recipe(tiny, prune={"ignore": ["nothing"]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(recipe(tiny), tmp_path / "run")


def test_a_rate_that_removes_nothing_is_refused_before_training(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^No unit would go: ask for more"):
        train(recipe(tiny, prune={"rate": 0.01}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_stops_the_run(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        train(recipe(tiny, prune=None, train={"lr": 1e30}), tmp_path / "run")
    assert str(caught.value) == (
        "The loss is nan in epoch 1: lower train.lr, or start with train.warmup."
    )


@pytest.mark.parametrize(
    "left", [["environment.json"], [".recipe.json.0a.part"], ["environment.json", "recipe.json"]]
)
def test_a_start_that_was_killed_can_be_made_again(
    tiny: str, tmp_path: Path, left: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).write_text("{")
    train(recipe(tiny, train={"epochs": 1}), tmp_path / "run")
    assert not list((tmp_path / "run").glob(".*"))
    assert json.loads((tmp_path / "run/recipe.json").read_text())["train"]["epochs"] == 1


def test_a_finished_run_needs_no_checkpoints_and_is_not_touched(tiny: str, tmp_path: Path) -> None:
    first = train(recipe(tiny), tmp_path / "run")
    for file in (tmp_path / "run/checkpoints").iterdir():
        file.unlink()
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "run").iterdir()}
    again = train(recipe(tiny), tmp_path / "run")
    assert before == {f: f.stat().st_mtime_ns for f in (tmp_path / "run").iterdir()}
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(first.model.eval()(x), again.model(x))


@pytest.mark.parametrize("gone", ["small.safetensors", "plan.json", "results.json"])
def test_what_a_finished_run_lacks_is_written_again(tiny: str, tmp_path: Path, gone: str) -> None:
    train(recipe(tiny), tmp_path / "run")
    before = weights(tmp_path / "run")
    (tmp_path / "run" / gone).unlink()
    (tmp_path / "run/metrics.jsonl").write_bytes(b"\0\xff\n{}\n")
    train(recipe(tiny), tmp_path / "run")
    assert (tmp_path / "run" / gone).exists()
    assert same(before, weights(tmp_path / "run"))


def test_a_folder_that_is_being_written_is_left_alone(tiny: str, tmp_path: Path) -> None:
    class Second:
        """Starts the same run again, in a process of its own, while this one is under way."""

        output = ""

        def started(self, *_: Any) -> None: ...

        def stepped(self, *_: Any) -> None: ...

        def finished(self, metrics: dict[str, Any]) -> None:
            if metrics["epoch"] == 1:
                code = (
                    "from fpgm.train import make_recipe, train; import json, sys;"
                    "train(make_recipe(json.loads(sys.argv[1])), sys.argv[2])"
                )
                table = json.dumps({"model": {"name": tiny}, **BASE})
                done = subprocess.run(
                    [sys.executable, "-c", code, table, str(tmp_path / "run")],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                self.output = done.stderr

    second = Second()
    train(recipe(tiny), tmp_path / "run", second)
    assert "run is being written by another process: wait, or choose another" in second.output
    assert len(logged(tmp_path / "run")) == 3


def test_checkpoints_of_another_network_are_refused(tiny: str, tmp_path: Path) -> None:
    train(recipe(tiny), tmp_path / "run")
    (tmp_path / "run/results.json").unlink()
    net = Path(tiny.partition(":")[0])
    net.write_text(net.read_text().replace("nn.Conv2d(3, 16, 3,", "nn.Conv2d(3, 16, 5,"))
    with pytest.raises(FileError, match=r"do not fit the network as it is now .*size mismatch"):
        train(recipe(tiny), tmp_path / "run")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'logits': y}", "The answer of the model is dict: "),
        ("return (y, y) if self.training else y", "The answer in training is tuple: "),
        ("return y[:, :5]", "The model answers with 5 classes and the data has 10: "),
        ("return y[:, :, None]", "The answer of the model is a tensor of 1×10×1: "),
        ("return y.view(7)", "The model's forward fails on a picture of 1×3×16×16: "),
    ],
)
def test_answers_that_are_none(tiny: str, tmp_path: Path, body: str, message: str) -> None:
    net = Path(tiny.partition(":")[0])
    net.write_text(
        f"{net.read_text()}\nclass Odd(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.net = make()\n"
        f"    def forward(self, x):\n        y = self.net(x)\n        {body}\n"
    )
    with pytest.raises(ModelError) as caught:
        train(recipe(f"{net}:Odd", prune=None), tmp_path / "run")
    assert str(caught.value).startswith(message)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_teacher_of_other_classes_is_refused(tiny: str, tmp_path: Path) -> None:
    net = Path(tiny.partition(":")[0])
    net.write_text(f"{net.read_text()}\ndef one():\n    return nn.Sequential(*make()[:-1], "
                   "nn.Linear(64, 1))\n")  # fmt: skip
    fpgm.save(load_model(f"{net}:one"), tmp_path / "one.safetensors")
    taught = recipe(tiny, distill={"model": f"{net}:one", "weights": f"{tmp_path}/one.safetensors"})
    with pytest.raises(ModelError, match=r"^The teacher answers with 1 classes and the model with"):
        train(taught, tmp_path / "run")


# Ways to train.


def test_going_on_with_a_compact_model(tiny: str, tmp_path: Path) -> None:
    train(recipe(tiny, train={"epochs": 6}), tmp_path / "run")
    small = str(tmp_path / "run/small.safetensors")
    tune = make_recipe(
        {
            "model": {"name": tiny, "compact": small},
            "data": BASE["data"],
            "train": {"epochs": 2, "lr": 0.01},
        }
    )
    tuned = train(tune, tmp_path / "tuned")
    before, after = weights(tmp_path / "run"), weights(tmp_path / "tuned")
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    assert not same(before, after)
    assert tuned.results["accuracy"] > 0.5


def test_from_trained_weights_training_starts_where_they_are(tiny: str, tmp_path: Path) -> None:
    train(recipe(tiny, prune=None, train={"epochs": 12}), tmp_path / "first")
    file = str(tmp_path / "first/weights.safetensors")
    start = make_recipe(
        {
            "model": {"name": tiny, "weights": file},
            **{part: BASE[part] for part in ("data", "prune")},
            "train": {"epochs": 1, "lr": 1e-6},
        }
    )
    train(start, tmp_path / "second")
    assert logged(tmp_path / "second")[0]["test_accuracy"] > 0.9


def test_a_teacher_is_listened_to(tiny: str, tmp_path: Path) -> None:
    """With labels ignored, a student learns what the teacher knows, from its answers alone."""
    train(recipe(tiny, prune=None, train={"epochs": 12}), tmp_path / "teacher")
    file = str(tmp_path / "teacher/weights.safetensors")
    taught = recipe(
        tiny,
        prune=None,
        train={"epochs": 12, "lr": 0.02},
        distill={"model": tiny, "weights": file, "share": 1.0, "temperature": 2.0},
    )
    assert train(taught, tmp_path / "student").results["accuracy"] > 0.8


def test_the_average_is_pruned_like_the_model(tiny: str, tmp_path: Path) -> None:
    outcome = train(recipe(tiny, train={"epochs": 8, "ema": 0.9}), tmp_path / "run")
    assert outcome.results["accuracy"] == outcome.results["masked_accuracy"] > 0.3
    assert "average_accuracy" in logged(tmp_path / "run")[-1]
    assert next(outcome.model.parameters()).shape[0] == 10


@pytest.mark.parametrize("start", [1, 5])
def test_the_average_is_as_good_as_the_model_however_long_it_reaches(
    tiny: str, tmp_path: Path, start: int
) -> None:
    """It reaches back over more steps than there are, and over the pruning."""
    plain = recipe(tiny, train={"epochs": 8}, prune={"start": start})
    model = train(plain, tmp_path / "plain").results["accuracy"]
    averaged = recipe(tiny, train={"epochs": 8, "ema": 0.9999}, prune={"start": start})
    assert train(averaged, tmp_path / "run").results["accuracy"] > model - 0.05 > 0.8


def test_what_the_launcher_says_of_accumulation_changes_nothing(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(tiny), tmp_path / "a")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    train(recipe(tiny), tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.parametrize(
    "run", [{"channels_last": True}, {"precision": "bf16"}, {"precision": "fp16"}]
)
def test_options_of_the_machine(tiny: str, tmp_path: Path, run: dict[str, Any]) -> None:
    outcome = train(recipe(tiny, run=run, train={"epochs": 6}), tmp_path / "run")
    assert outcome.results["accuracy"] == outcome.results["masked_accuracy"]
    assert outcome.results["accuracy"] > 0.3


def test_a_batch_in_parts_is_the_batch(tmp_path: Path) -> None:
    """Without batch norm, which sees its part only, accumulated gradients are the whole's."""
    net = write_net(tmp_path, "", 0.0)
    whole = train(recipe(net), tmp_path / "whole").model
    parts = train(recipe(net, run={"accumulate": 3}), tmp_path / "parts").model
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# Killed, and going on.


def start(file: Path, out: Path, *launcher: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own, or several; what it says goes to a file beside `out`."""
    with said(out).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "fpgm", "train", str(file), "--out", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def said(out: Path) -> Path:
    return out.with_suffix(".log")


def finish(file: Path, out: Path, *launcher: str) -> str:
    """A run to its end, and what it said."""
    with start(file, out, *launcher) as run:
        try:
            code = run.wait(timeout=240)
        finally:
            kill(run)
    text = said(out).read_text()
    assert code == 0, text
    return text


def kill(run: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def write_recipe(folder: Path, model: str, epochs: int = 8) -> Path:
    file = folder / "recipe.toml"
    file.write_text(
        f'[model]\nname = "{model}"\n'
        '[data]\nname = "synthetic"\nbatch = 16\ncrop = 2\nflip = true\n'
        f"[train]\nepochs = {epochs}\nlr = 0.05\nmomentum = 0.9\nema = 0.9\n"
        '[prune]\nrate = 0.4\nalign = 1\nmode = "hard"\n'
    )
    return file


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_weights(tiny: str, tmp_path: Path) -> None:
    """Batch norm, dropout, momentum, an average, held units, data order: all go on exactly."""
    file = write_recipe(tmp_path, tiny)
    finish(file, tmp_path / "calm")
    kills = 0
    for wait_for, delay in ((1, 0.0), (2, 0.03), (4, 0.11), (6, 0.2), (8, 0.0)):
        run = start(file, tmp_path / "run")
        deadline = time.time() + 120
        while run.poll() is None and time.time() < deadline:
            metrics = tmp_path / "run/metrics.jsonl"
            if metrics.exists() and len(metrics.read_text().splitlines()) >= wait_for:
                break
            time.sleep(0.005)
        time.sleep(delay)
        kills += run.poll() is None
        kill(run)
    assert kills >= 3, said(tmp_path / "run").read_text()
    finish(file, tmp_path / "run")
    assert same(weights(tmp_path / "calm"), weights(tmp_path / "run"))
    epochs = [metrics["epoch"] for metrics in logged(tmp_path / "run")]
    assert epochs == list(range(1, 9))


def test_resuming_in_the_same_process_is_exact(tiny: str, tmp_path: Path) -> None:
    class Stopper:
        def started(self, *_: Any) -> None: ...

        def stepped(self, epoch: int, step: int, figures: dict[str, float]) -> None:
            if (epoch, step) == (2, 3):
                raise KeyboardInterrupt

        def finished(self, metrics: dict[str, Any]) -> None: ...

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
    state = Checkpoints(tmp_path / "run/checkpoints").newest()
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
        "one is intact: make room and start again to go on from there."
    )
    state = checkpoints.newest()
    assert state is not None
    assert state["epoch"] == 1
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "epoch-00001.json",
        "epoch-00001.pt",
    ]


def test_a_checkpoint_comes_after_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for epoch in (99_999, 100_000):
        checkpoints.save(epoch, {"epoch": epoch})
    state = checkpoints.newest()
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


# Many processes.


def torchrun(*options: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    """The same global batch, cut in two: the same units, and the same weights to rounding."""
    file = write_recipe(tmp_path, write_net(tmp_path, "", 0.0), epochs=4)
    for name, launcher in (("one", ()), ("two", torchrun())):
        finish(file, tmp_path / name, *launcher)
    assert json.loads((tmp_path / "two/environment.json").read_text())["processes"] == 2
    plans = [fpgm.Plan.from_json((tmp_path / n / "plan.json").read_text()) for n in ("one", "two")]
    assert plans[0].cuts == plans[1].cuts
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_goes_on(tiny: str, tmp_path: Path) -> None:
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
    assert "going on after epoch 2 of 4" in output
    epochs = [metrics["epoch"] for metrics in logged(tmp_path / "run")]
    assert epochs == [1, 2, 3, 4]


def test_a_batch_that_cannot_be_shared_is_refused(tiny: str) -> None:
    with pytest.raises(
        RequestError, match=r"^data\.batch is 32, which 3 processes cannot share equally\.$"
    ):
        _open_data(recipe(tiny), Share(0, 3), torch.device("cpu"))


def test_the_net_of_these_tests_has_what_makes_resuming_hard(tiny: str) -> None:
    kinds = {type(module) for module in load_model(tiny).modules()}
    assert {nn.BatchNorm2d, nn.Dropout} <= kinds
