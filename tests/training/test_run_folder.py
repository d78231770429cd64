"""What a run leaves behind, and what it will not write over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.faults import Command, command
from tests.helpers.runs import (
    BASE,
    logged,
    recipe,
    same,
    weights,
)

import fpgm
from fpgm.errors import FileError, ModelError, RequestError
from fpgm.models.registry import load_model
from fpgm.training import read_recipe, train


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
    plan = fpgm.Plan.from_json((tmp_path / "run/plan.json").read_text())
    assert plan.params_after == outcome.results["params_after"]
    assert sum(p.numel() for p in outcome.model.parameters()) == plan.params_after


def test_tensorboard_has_metrics_and_norms_of_every_epoch(tiny: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = train(recipe(tiny), tmp_path / "run")
    every = {"histograms": 0}  # not only the last
    result = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance=every)
    result.Reload()
    accuracies = [m["test_accuracy"] for m in logged(tmp_path / "run")]
    assert [e.value for e in result.Scalars("test_accuracy")] == pytest.approx(accuracies)
    layers = {n for n, p in outcome.model.named_parameters() if p.ndim > 1}
    assert set(result.Tags()["histograms"]) == {f"norms/{name}" for name in layers}
    epochs = result.Histograms(f"norms/{sorted(layers)[0]}")
    assert [e.step for e in epochs] == [1, 2, 3]
    assert epochs[-1].histogram_value.min == 0  # filters that were pruned


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
    assert read_recipe(tmp_path / "run/recipe.json", allow_code=True) == wanted
    with pytest.raises(RequestError, match="code that would be run"):  # it may be anyone's
        read_recipe(tmp_path / "run/recipe.json")


@pytest.mark.parametrize(
    "wrong", [{"files": []}, {"files": ["../../other"]}, {"accuracy": "\x1b[2J"}, {"epochs": None}]
)
def test_invalid_results_are_written_again(
    tiny: str, tmp_path: Path, wrong: dict[str, object]
) -> None:
    first = train(recipe(tiny, train={"epochs": 1}), tmp_path / "run")
    file = tmp_path / "run/results.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    assert train(recipe(tiny, train={"epochs": 1}), tmp_path / "run").results == first.results


def test_a_folder_of_another_recipe_is_not_changed(tiny: str, tmp_path: Path) -> None:
    train(recipe(tiny), tmp_path / "run")
    with pytest.raises(FileError) as caught:
        train(recipe(tiny, seed=5), tmp_path / "run")
    assert str(caught.value) == (
        f"{tmp_path}/run contains a run of a different recipe (seed was 0, now 5): choose another "
        f"folder, or give the recipe it was started with ({tmp_path}/run/recipe.json)."
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(FileError, match="exists and is not a run folder: choose another folder"):
        train(recipe(tiny), other)
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]


def test_a_recipe_that_cannot_run_leaves_no_folder(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^ignore: no layer matches 'nothing'\."):
        train(recipe(tiny, prune={"ignore": ["nothing"]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(recipe(tiny), tmp_path / "run")


def test_a_rate_that_removes_nothing_is_refused_before_training(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^This would remove no unit: request more"):
        train(recipe(tiny, prune={"rate": 0.01}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_stops_the_run(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        train(recipe(tiny, prune=None, train={"lr": 1e30}), tmp_path / "run")
    assert str(caught.value) == (
        "The loss is nan in epoch 1: lower train.lr, or start with train.warmup."
    )


@pytest.mark.parametrize(
    "left",
    [
        ["environment.json"],
        [".recipe.json.0123abcd.part/part"],
        [".fpgm.lock"],
        ["environment.json", "recipe.json"],
    ],
)
def test_a_killed_start_can_be_repeated(tiny: str, tmp_path: Path, left: list[str]) -> None:
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
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


def test_a_folder_that_is_being_written_is_not_changed(tiny: str, tmp_path: Path) -> None:
    class Second:
        """Starts the same run again, in a process of its own, while this one is under way."""

        output = ""

        def on_epoch_start(self, *_: Any) -> None: ...

        def on_step(self, *_: Any) -> None: ...

        def on_epoch_end(self, metrics: dict[str, Any]) -> None:
            if metrics["epoch"] == 1:
                code = (
                    "from fpgm.training import make_recipe, train; import json, sys;"
                    "train(make_recipe(json.loads(sys.argv[1])), sys.argv[2])"
                )
                table = json.dumps({"model": {"name": tiny}, **BASE})
                self.output = command(table, tmp_path / "run", before=code).err

    second = Second()
    train(recipe(tiny), tmp_path / "run", second)
    assert "run is being written by another process: wait, or choose another" in second.output
    assert len(logged(tmp_path / "run")) == 3


def test_of_two_starts_at_once_one_gets_the_folder(tmp_path: Path, tiny: str) -> None:
    """Each makes the folder and its recipe, but they lock the same file."""
    code = (
        "import json, sys, time; from pathlib import Path;"
        "from fpgm.training.run_folder import RunFolder; from fpgm.training import make_recipe;"
        "folder = RunFolder(Path(sys.argv[2]), make_recipe(json.loads(sys.argv[1])));"
        "folder.create(1); print('mine', flush=True); time.sleep(3); sys.exit()"
    )
    table = json.dumps({"model": {"name": tiny}, **BASE})
    runs = [Command(table, tmp_path / "run", before=code) for _ in range(3)]
    said = [run.end() for run in runs]
    assert sum(item.out == "mine\n" for item in said) == 1
    assert sum("is being written by another process" in item.err for item in said) == 2


def test_a_damaged_result_is_named_where_it_lies(tiny: str, tmp_path: Path) -> None:
    train(recipe(tiny), tmp_path / "run")
    file = tmp_path / "run" / "small.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(FileError, match=f"^{file} is truncated or damaged"):
        train(recipe(tiny), tmp_path / "run")


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
        ("return {'logits': y}", "The output of the model is dict: "),
        ("return (y, y) if self.training else y", "The output in training is tuple: "),
        ("return y[:, :5]", "The model has 5 outputs and the data has 10 classes: "),
        ("return y[:, :, None]", "The output of the model is a tensor of 1×10×1: "),
        ("return y.view(7)", "The model's forward fails on an image of 1×3×16×16: "),
    ],
)
def test_outputs_that_are_invalid(tiny: str, tmp_path: Path, body: str, message: str) -> None:
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
    with pytest.raises(ModelError, match=r"^The teacher has 1 outputs and the model has"):
        train(taught, tmp_path / "run")
