"""The network and the images that ship: small enough, what they are said to be, and of use."""

import json
from pathlib import Path

import pytest
import torch
from tests.helpers.shell import run

import fpgm
from fpgm.data import cifar10
from fpgm.data.cifar10_sample import read_sample, write_sample
from fpgm.data.in_memory import Images
from fpgm.data.registry import CIFAR10
from fpgm.errors import FileError
from fpgm.models import assets, build, trained_resnet20
from fpgm.models.checkpoint import load_weights, read_weights, weights_file
from fpgm.training.recipe import read_recipe
from fpgm.training.recipes import SHIPPED

EXPECTED = json.loads((assets.FOLDER / "resnet20.json").read_text())


def test_they_are_small() -> None:
    assert assets.WEIGHTS.stat().st_size < 1_000_000
    assert assets.SAMPLE_IMAGES.stat().st_size < 4_000_000


def test_weights_are_float16_and_become_float32() -> None:
    kinds = {tensor.dtype for tensor in read_weights(assets.WEIGHTS).values()}
    assert kinds == {torch.float16, torch.int64}  # int64: how many batches norms have seen
    assert {p.dtype for p in trained_resnet20().parameters()} == {torch.float32}


def test_the_network_has_the_documented_accuracy() -> None:
    _, test = read_sample()
    model = trained_resnet20()
    with torch.no_grad():
        right = model(CIFAR10.apply(test.images)).argmax(1) == test.labels
    output = EXPECTED["accuracy"]
    assert float(right.float().mean()) == pytest.approx(
        output["float16, the 1,000 that ship"], abs=2e-3
    )
    assert output["float16, 10,000 test pictures"] >= 0.9
    assert (
        abs(output["float16, 10,000 test pictures"] - output["float32, 10,000 test pictures"])
        < 1e-3
    )


def test_the_recipe_beside_it_is_the_one_that_ships() -> None:
    recipe = read_recipe(SHIPPED / "cifar10-resnet20-baseline.toml")
    assert recipe.digest() == EXPECTED["recipe"]["digest"]
    assert len(EXPECTED["epochs"]) == recipe.train.epochs


def test_images_are_the_first_of_cifar10() -> None:
    root = cifar10.default_root()
    if not (root / "cifar-10-batches-py").is_dir():
        pytest.skip("CIFAR-10 is not here: fpgm data cifar10")
    data = cifar10.read(root)
    train, test = read_sample()
    assert (len(train), len(test)) == (900, 1000)
    assert torch.equal(train.images, data.train_images[:900])
    assert torch.equal(train.labels, data.train_labels[:900])
    assert torch.equal(test.images, data.test_images[:1000])
    assert torch.equal(test.labels, data.test_labels[:1000])


def test_every_class_is_there() -> None:
    for part in read_sample():
        assert set(part.labels.tolist()) == set(range(10))


def test_images_survive_a_file_unchanged(tmp_path: Path) -> None:
    parts = [
        Images(torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (n,)))
        for n in (5, 3)
    ]
    write_sample(tmp_path / "some.npz", *parts)
    for before, after in zip(parts, read_sample(tmp_path / "some.npz"), strict=True):
        assert torch.equal(before.images, after.images)
        assert torch.equal(before.labels, after.labels)


def test_the_command_line_knows_the_weights_by_a_word(tmp_path: Path) -> None:
    out = tmp_path / "small"
    run("prune", "resnet20", "--weights", "shipped", "--rate", "0.3", "--out", out)
    assert "Verified" in run("verify", out)[0]  # the package has them: no need to say where
    assert "Verified" in run("verify", out, "--weights", "shipped")[0]
    small = fpgm.load(out / "small.safetensors", lambda: build("resnet20"))
    assert small.linear.in_features < 64


def test_they_fit_one_network_only() -> None:
    with pytest.raises(FileError, match=r"^The shipped weights fit only resnet20"):
        load_weights(build("resnet56"), weights_file("shipped"))


def test_a_recipe_may_start_from_them(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        '[model]\nname = "resnet20"\nweights = "shipped"\n'
        '[data]\nname = "cifar10-sample"\nbatch = 100\nlimit = 100\n'
        "[train]\nepochs = 1\nlr = 1e-6\n"
    )
    run("train", recipe, "--out", tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["test_accuracy"] > 0.85
