"""Recipes: what is read is what was written, and what makes no sense is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.shell import refused

from fpgm.cli.train import SHIPPED, find_recipe
from fpgm.errors import FileError, RequestError
from fpgm.models.registry import load_model
from fpgm.training import read_recipe
from fpgm.training.lr_schedule import learning_rate
from fpgm.training.recipe import TrainConfig, make_recipe
from fpgm.workflow.soft_pruner import SoftPruner

FILES = sorted(SHIPPED.glob("[!_]*.toml"))
GIVEN = ["model.weights=w.safetensors"]
LEAST: dict[str, Any] = {
    "model": {"name": "digits"},
    "data": {"name": "digits", "batch": 64},
    "train": {"epochs": 3, "lr": 0.1},
}


def with_(**parts: Any) -> dict[str, Any]:
    return LEAST | {
        part: {**LEAST.get(part, {}), **options} if isinstance(options, dict) else options
        for part, options in parts.items()
    }


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (with_(train={"epoch": 3}), "there is no 'train.epoch': did you mean 'epochs'?"),
        (with_(training={}), "there is no 'training': did you mean 'train'?"),
        (with_(seed="x"), "seed is 'x': give an integer."),
        (with_(train={"lr": "fast"}), "train.lr is 'fast': give a number."),
        (with_(train={"epochs": 2.5}), "train.epochs is 2.5: give an integer."),
        (with_(data={"flip": 1}), "data.flip is 1: give true or false or 'alternate'."),
        (with_(train={"milestones": 3}), "train.milestones is 3: give a list."),
        (with_(prune={"rates": 0.5}), "prune.rates is 0.5: give a table."),
        (with_(data={"name": 3}), "data.name is 3: give text."),
        (
            with_(train={"schedule": "poly"}),
            "train.schedule is 'poly': give one of 'constant', 'step', 'cosine', 'linear'.",
        ),
        ({**LEAST, "model": "digits"}, "model is 'digits', not a table of options."),
        ({**LEAST, "train": {"lr": 0.1}}, "train.epochs is missing."),
        (
            with_(prune={"rate": 0.4, "start": 4}),
            "prune.start and prune.interval put the first pruning after the last epoch.",
        ),
        (with_(train={"epochs": 0}), "train.epochs is 0: give at least 1."),
        (with_(train={"lr": 0.0}), "train.lr is 0.0: give a number above 0."),
        (with_(data={"batch": 0}), "data.batch is 0: give at least 1."),
        (with_(run={"accumulate": 0}), "run.accumulate is 0: give at least 1."),
        (with_(train={"lr": float("inf")}), "train.lr is inf: give a number above 0."),
        (with_(train={"momentum": -1}), "train.momentum is -1.0: give at least 0 and below 1."),
        (
            with_(train={"momentum": 0, "nesterov": True}),
            "train.nesterov needs train.momentum above 0.",
        ),
        (with_(train={"weight_decay": -1}), "train.weight_decay is -1.0: give 0 or more."),
        (with_(train={"gamma": -1}), "train.gamma is -1.0: give a number above 0."),
        (with_(train={"warmup": -1}), "train.warmup is -1: give 0 epochs or more."),
        (
            with_(train={"label_smoothing": 1.5}),
            "train.label_smoothing is 1.5: give at least 0 and below 1.",
        ),
        (with_(data={"limit": 0}), "data.limit is 0: give at least 1."),
        (with_(data={"crop": -1}), "data.crop is -1: give 0 pixels or more."),
        (with_(data={"cutout": -1}), "data.cutout is -1: give 0 pixels or more."),
        (with_(data={"flip": "often"}), "data.flip is 'often': give true or false or 'alternate'."),
        (with_(data={"size": 0}), "data.size is 0: give at least 1."),
        (with_(data={"workers": -1}), "data.workers is -1: give 0 or more."),
        (
            with_(data={"mean": [0.5], "std": [0]}),
            "data.std contains a number that is not above 0.",
        ),
        (with_(seed=2**63), f"seed is {2**63}: give a number that fits in 64 bits."),
        (
            with_(distill={"model": "digits", "weights": "w", "share": 7}),
            "distill.share is a fraction of the loss: give a number from 0 to 1.",
        ),
        (
            with_(distill={"model": "digits", "weights": "w", "temperature": 0}),
            "distill.temperature must be above 0.",
        ),
        (
            with_(model={"compact": "small.safetensors", "weights": "w"}),
            "model.compact holds weights: leave model.weights out.",
        ),
        (
            with_(train={"ema": 1.0}),
            "train.ema is 1.0: give a decay between 0 and 1, such as 0.999.",
        ),
        (
            with_(train={"schedule": "step"}),
            "train.schedule is 'step' and train.milestones is empty: name the epochs.",
        ),
        (
            with_(data={"mean": [0.5]}),
            "data.mean and data.std go together: give both or neither.",
        ),
        (
            with_(model={"compact": "small.safetensors"}, prune={"rate": 0.4}),
            "model.compact continues training a pruned model: leave [prune] out.",
        ),
    ],
)
def test_invalid_values(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_recipe(table, "r.toml")
    assert str(caught.value) == f"r.toml: {message}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"^The recipe .*/none\.toml cannot be read: No such file"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("lr = = 3")
    with pytest.raises(FileError, match=r"^.*/bad\.toml is not valid TOML: .*line 1"):
        read_recipe(tmp_path / "bad.toml")


def test_a_circle_of_recipes_is_detected(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(FileError, match=r"/a\.toml extends itself: "):
        read_recipe(tmp_path / "a.toml")


def test_a_folder_does_not_hide_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits-quick").mkdir()
    assert find_recipe("digits-quick") == SHIPPED / "digits-quick.toml"


def test_a_recipe_states_only_what_differs_from_the_one_it_builds_on(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        '[model]\nname = "digits"\n[data]\nname = "digits"\nbatch = 64\n'
        "[train]\nepochs = 3\nlr = 0.1\nmilestones = [1, 2]\n"
    )
    (tmp_path / "own.toml").write_text(
        'extends = "base.toml"\n[train]\nlr = 0.2\nmilestones = [3]\n'
    )
    recipe = read_recipe(tmp_path / "own.toml")
    assert (recipe.train.epochs, recipe.train.lr, recipe.train.milestones) == (3, 0.2, (3,))


def test_a_shipped_recipe_can_be_built_on_and_one_budget_takes_another_s_place(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.toml"
    file.write_text('extends = "digits-quick"\n[prune]\nmacs = 0.5\n')
    recipe = read_recipe(file)
    assert recipe.model.name == "digits"
    assert recipe.prune is not None
    assert (recipe.prune.rate, recipe.prune.macs, recipe.prune.start) == (None, 0.5, 5)


@pytest.mark.parametrize("name", ["cifar10-resnet20-pretrained", "cifar10-vgg16-pretrained"])
def test_a_recipe_from_trained_weights_needs_them(name: str) -> None:
    file = SHIPPED / f"{name}.toml"
    with pytest.raises(RequestError) as caught:
        read_recipe(file)
    assert str(caught.value) == (
        f"{file}: it starts from trained weights: pass --set model.weights=FILE."
    )
    assert read_recipe(file, ["model.weights=a.safetensors"]).model.weights == "a.safetensors"


def test_single_values_are_replaced_from_the_command_line(tmp_path: Path) -> None:
    file = SHIPPED / "digits-quick.toml"
    changes = ["train.epochs=7", "model.weights=a b.safetensors", "train.milestones=[1, 2]"]
    recipe = read_recipe(file, changes)
    assert recipe.train.epochs == 7
    assert recipe.model.weights == "a b.safetensors"
    assert recipe.train.milestones == (1, 2)
    assert recipe.train.lr == read_recipe(file).train.lr
    item = tmp_path / "own.toml"
    item.write_text('extends = "cifar10-resnet20-quick"\n[prune]\nhold = 2\n')
    held, free = (read_recipe(item, change).prune for change in ([], ["prune.hold=none"]))
    assert held is not None
    assert free is not None
    assert (held.hold, free.hold) == (2, None)
    with pytest.raises(RequestError) as caught:
        read_recipe(file, ["train.epochs"])
    assert str(caught.value) == (
        "--set is 'train.epochs': write a name and a value, train.epochs=3."
    )


def test_the_digest_knows_what_matters() -> None:
    first = make_recipe(LEAST)
    assert first.digest() == make_recipe(with_(train={"momentum": 0.9})).digest()
    assert first.digest() != make_recipe(with_(seed=1)).digest()
    assert first.digest() != make_recipe(with_(prune={"rate": 0.4})).digest()


# The shipped recipes.


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_recipe_names_its_own_command(file: Path) -> None:
    recipe = read_recipe(file, [] if file.stem.endswith("finetune") else GIVEN)
    text = file.read_text()
    assert f"train {file.stem}" in text.split("\n\n")[0]
    assert (recipe.prune is None) == file.stem.endswith(("baseline", "finetune"))
    assert (recipe.model.compact is None) != file.stem.endswith("finetune")


def test_the_papers_hyper_parameters() -> None:
    """200 epochs of SGD at 0.1 in steps of 0.2 on CIFAR, 100 in steps of 0.1 on ImageNet."""
    for depth in (20, 32, 56, 110):
        scratch = read_recipe(SHIPPED / f"cifar10-resnet{depth}-scratch.toml")
        assert scratch.model.name == f"resnet{depth}"
        assert (scratch.data.batch, scratch.data.crop, scratch.data.flip) == (128, 4, True)
        part = scratch.train
        assert (part.epochs, part.lr, part.momentum, part.nesterov) == (200, 0.1, 0.9, True)
        assert (part.weight_decay, part.milestones, part.gamma) == (5e-4, (60, 120, 160), 0.2)
        assert part.warmup == (depth == 110)
        assert scratch.prune is not None
        assert (scratch.prune.rate, scratch.prune.residual) == (0.4, "independent")
        pretrained = read_recipe(SHIPPED / f"cifar10-resnet{depth}-pretrained.toml", GIVEN)
        assert pretrained.train.lr == pytest.approx(part.lr / 10)
        kinds = {"mix": "mix", "sfp": "l2", "scratch": "fpgm", "pretrained": "fpgm"}
        for name, criterion in kinds.items():
            prune = read_recipe(SHIPPED / f"cifar10-resnet{depth}-{name}.toml", GIVEN).prune
            assert prune is not None
            assert prune.criterion == criterion
            assert prune.mode == ("soft" if name == "sfp" else "hard")
    vgg = read_recipe(SHIPPED / "cifar10-vgg16-scratch.toml")
    assert (vgg.train.epochs, vgg.data.batch, vgg.train.weight_decay) == (160, 64, 1e-4)
    assert vgg.train.milestones == (80, 120)
    for depth in (18, 34, 50, 101):
        net = read_recipe(SHIPPED / f"imagenet-resnet{depth}-scratch.toml")
        assert (net.train.epochs, net.data.batch, net.train.weight_decay) == (100, 256, 1e-4)
        assert (net.train.milestones, net.train.gamma) == ((30, 60, 90), 0.1)


@pytest.mark.parametrize(
    ("name", "removed"), [("cifar10-resnet20-scratch", 0.517), ("cifar10-vgg16-scratch", 0.354)]
)
def test_a_papers_recipe_prunes_what_the_papers_code_prunes(name: str, removed: float) -> None:
    """With whole filters: 51.7 % of ResNet-20's MACs at 40 %, 35.4 % of VGG-16's at 20 %."""
    recipe = read_recipe(SHIPPED / f"{name}.toml")
    part = recipe.prune
    assert part is not None
    pruner = SoftPruner(
        load_model(recipe.model.name),
        torch.randn(1, 3, 32, 32),
        rate=part.rate,
        residual=part.residual,
        rounding=part.rounding,
        ignore=part.ignore,
    )
    pruner.step()
    assert pruner.plan is not None
    assert pruner.plan.macs_removed == pytest.approx(removed, abs=5e-4)


# The learning rate.


def test_a_cosine_falls_from_the_warm_up_to_zero() -> None:
    part = TrainConfig(epochs=10, lr=1.0, schedule="cosine", warmup=2)
    assert [learning_rate(part, e) for e in (0, 1, 2)] == [0.0, 0.5, 1.0]
    assert learning_rate(part, 6) == pytest.approx(0.5)
    assert learning_rate(part, 10) == pytest.approx(0.0)


def test_a_linear_schedule_falls_evenly_from_the_warm_up_to_zero() -> None:
    part = TrainConfig(epochs=10, lr=1.0, schedule="linear", warmup=2)
    rates = [learning_rate(part, e) for e in (0, 1, 2, 4, 10)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.0])


def test_a_warm_up_may_stay_at_one_rate() -> None:
    part = TrainConfig(
        epochs=9, lr=0.1, warmup=1, warmup_lr=0.01, schedule="step", milestones=(5,), gamma=0.2
    )
    rates = [learning_rate(part, e) for e in (0, 0.99, 1, 4.99, 5)]
    assert rates == pytest.approx([0.01, 0.01, 0.1, 0.1, 0.02])


def test_a_recipe_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(FileError) as caught:
        read_recipe(tmp_path / "list.json")
    assert (
        str(caught.value)
        == f"{tmp_path}/list.json is not a recipe: it contains no table of options."
    )


@pytest.mark.parametrize(
    ("prune", "message"),
    [
        ({"start": 2}, "the last epoch"),
        ({"interval": 2}, "the last epoch"),
        ({"start": 1, "interval": 1, "end": 1}, None),
        ({"interval": 3, "end": 2}, "prune.end"),
    ],
)
def test_a_start_after_the_end(prune: dict[str, int], message: str | None) -> None:
    epochs = 3 if "end" in prune else 1
    table = with_(train={"epochs": epochs}, prune={"rate": 0.4, **prune})
    if message is None:
        make_recipe(table)
        return
    with pytest.raises(RequestError) as caught:
        make_recipe(table, "own")
    assert str(caught.value) == (
        f"own: prune.start and prune.interval put the first pruning after {message}."
    )


def test_a_hold_after_the_end() -> None:
    with pytest.raises(RequestError, match=r"own: prune\.hold comes after the last epoch\."):
        make_recipe(with_(train={"epochs": 2}, prune={"rate": 0.4, "hold": 3}), "own")


class TestCode:
    """A recipe from someone else runs no code unless the user says so."""

    EVIL = "from pathlib import Path\nPath('ran').touch()\n"

    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "net.py").write_text(self.EVIL)
        text = '[model]\nname = "{}"\n[data]\nname = "digits"\nbatch = 64\n'
        text += "[train]\nepochs = 1\nlr = 0.1\n"
        (tmp_path / "own.toml").write_text(text.format("net.py:make"))
        (tmp_path / "plain.toml").write_text(text.format("digits"))
        teacher = '[distill]\nmodel = "net.py:make"\nweights = "w"\n'
        (tmp_path / "teacher.toml").write_text(text.format("digits") + teacher)
        (tmp_path / "above.toml").write_text('extends = "own.toml"\nseed = 1\n')
        return tmp_path

    @pytest.mark.parametrize(
        ("file", "key"),
        [("own", "model.name"), ("teacher", "distill.model"), ("above", "model.name")],
    )
    def test_a_file_that_names_code_is_refused(self, place: Path, file: str, key: str) -> None:
        line = (
            f"{file}.toml: {key} is 'net.py:make', which is code that would be run: if you trust "
            "it, pass --allow-code (in Python: allow_code=True)."
        )
        with pytest.raises(RequestError) as caught:
            read_recipe(f"{file}.toml")
        assert str(caught.value) == line
        assert refused("train", f"{file}.toml") == line
        assert not (place / "ran").exists()
        assert read_recipe(f"{file}.toml", allow_code=True) is not None

    def test_code_runs_when_it_is_allowed(self, place: Path) -> None:
        refused("train", "own.toml", "--allow-code")  # it has no make
        assert (place / "ran").exists()

    def test_names_from_the_command_line_are_the_user_s(self, place: Path) -> None:
        change = ["model.name=net.py:make"]
        assert read_recipe("plain.toml", change).model.name == "net.py:make"
        assert read_recipe("own.toml", ["model.name=resnet20"]).model.name == "resnet20"
        with pytest.raises(RequestError, match="code that would be run"):
            read_recipe("own.toml", ["train.epochs=3"])
