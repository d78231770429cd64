"""The networks and the images that ship: small enough, what they are said to be, and of use."""

import json
from pathlib import Path

import pytest
import torch
from tests.helpers.shell import run

import fpgm
from fpgm.data import cifar10
from fpgm.data.cifar10_sample import pack_lossy, read_sample, unpack_lossy, write_sample
from fpgm.data.in_memory import Images
from fpgm.data.registry import CIFAR10
from fpgm.errors import FileError
from fpgm.models import assets, build, trained_resnet20, trained_wide_resnet
from fpgm.models.checkpoint import load_weights, read_weights, shipped_file, weights_file
from fpgm.training.recipe import read_recipe
from fpgm.training.recipes import SHIPPED

EXPECTED = {
    name: json.loads(file.with_suffix(".json").read_text())
    for name, file in assets.SHIPPED_WEIGHTS.items()
}
TRAINED = {"resnet20": trained_resnet20, "resnet11_wide": trained_wide_resnet}
NETWORKS = pytest.mark.parametrize("name", EXPECTED)


def test_they_are_small() -> None:
    assert assets.SHIPPED_WEIGHTS["resnet20"].stat().st_size < 1_000_000
    assert assets.SHIPPED_WEIGHTS["resnet11_wide"].stat().st_size < 5_000_000
    assert assets.SAMPLE_IMAGES.stat().st_size < 4_000_000


@NETWORKS
def test_weights_are_float16_and_become_float32(name: str) -> None:
    kinds = {tensor.dtype for tensor in read_weights(assets.SHIPPED_WEIGHTS[name]).values()}
    assert kinds == {torch.float16, torch.int64}  # int64: how many batches norms have seen
    assert {p.dtype for p in TRAINED[name]().parameters()} == {torch.float32}


@NETWORKS
def test_the_network_has_the_documented_accuracy(name: str) -> None:
    _, test = read_sample()
    model = TRAINED[name]()
    with torch.no_grad():
        outputs = torch.cat([model(CIFAR10.apply(part)) for part in test.images.split(250)])
    right = outputs.argmax(1) == test.labels
    output = EXPECTED[name]["accuracy"]
    assert float(right.float().mean()) == pytest.approx(
        output["float16, the 1,000 that ship"], abs=2e-3
    )
    assert output["float16, 10,000 test pictures"] >= {"resnet20": 0.9, "resnet11_wide": 0.93}[name]
    assert (
        abs(output["float16, 10,000 test pictures"] - output["float32, 10,000 test pictures"])
        < 1e-3
    )


@NETWORKS
def test_the_recipe_beside_it_is_the_one_that_ships(name: str) -> None:
    recipe = read_recipe(SHIPPED / f"cifar10-{name}-baseline.toml")
    assert recipe.digest() == EXPECTED[name]["recipe"]["digest"]
    assert len(EXPECTED[name]["epochs"]) == recipe.train.epochs


def test_images_are_the_first_of_cifar10() -> None:
    root = cifar10.default_root()
    if not (root / "cifar-10-batches-py").is_dir():
        pytest.skip("CIFAR-10 is not here: fpgm data cifar10")
    data = cifar10.read(root)
    train, test = read_sample()
    assert (len(train), len(test)) == (2500, 1000)
    errors = train.images.double() - data.train_images[:2500].double()
    assert errors.square().mean().sqrt() < 3  # lossy, of 255 levels
    assert torch.equal(train.labels, data.train_labels[:2500])
    assert torch.equal(test.images, data.test_images[:1000])
    assert torch.equal(test.labels, data.test_labels[:1000])


def test_every_class_is_there() -> None:
    for part in read_sample():
        assert set(part.labels.tolist()) == set(range(10))


def test_test_images_survive_a_file_unchanged(tmp_path: Path) -> None:
    parts = [
        Images(torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (n,)))
        for n in (5, 3)
    ]
    write_sample(tmp_path / "some.npz", *parts)
    train, test = read_sample(tmp_path / "some.npz")
    assert torch.equal(test.images, parts[1].images)
    assert train.images.shape == parts[0].images.shape
    for before, after in zip(parts, (train, test), strict=True):
        assert torch.equal(before.labels, after.labels)


def test_finer_steps_lose_less() -> None:
    """A step of s errs by s / √12 in each coefficient, and so in each pixel of a gray image."""
    gray = torch.randint(0, 256, (50, 1, 32, 32), dtype=torch.uint8).expand(-1, 3, -1, -1).numpy()
    for step in (16, 32, 64):
        steps = (step, step, step)
        back = unpack_lossy(pack_lossy(gray, steps), steps)
        inside = (back > 0) & (back < 255)  # clipped values are closer
        error = (back.astype(float) - gray)[inside].std()
        assert error == pytest.approx(step / 12**0.5, rel=0.15)


@NETWORKS
def test_the_command_line_knows_the_weights_by_a_word(name: str, tmp_path: Path) -> None:
    out = tmp_path / "small"
    run("prune", name, "--weights", "shipped", "--rate", "0.3", "--out", out)
    assert "Verified" in run("verify", out)[0]  # the package has them: no need to say where
    assert "Verified" in run("verify", out, "--weights", "shipped")[0]
    small = fpgm.load(out / "small.safetensors", lambda: build(name))
    assert small.linear.in_features < build(name).linear.in_features


def test_they_fit_their_networks_only() -> None:
    message = r"^The shipped weights fit only resnet20 and resnet11_wide with 10 classes\.$"
    for wrong in (build("resnet56"), build("resnet11_wide", classes=100)):
        with pytest.raises(FileError, match=message):
            load_weights(wrong, "shipped")
    with pytest.raises(FileError, match=message):
        load_weights(build("resnet56"), assets.SHIPPED_WEIGHTS["resnet20"])
    with pytest.raises(FileError, match=message):
        shipped_file(weights_file("shipped"), "resnet56")


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
