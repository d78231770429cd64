"""Recovery and sensitivity on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers.shell import refused, run

from fpgm.cli._outcome import recovery_lines
from fpgm.pruning.serialization import DIGEST, content_sha256
from fpgm.recovery.api import DISTILLED, PRUNED, Recovery
from fpgm.recovery.candidates import Candidate

LOOK = ("--data", "synthetic", "--images", 128)
NET = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )
"""


@pytest.fixture
def model(tmp_path: Path) -> tuple[Any, ...]:
    (tmp_path / "net.py").write_text(NET)
    return (f"{tmp_path}/net.py:make", "--input", "1x3x16x16")


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def test_recovered_written_and_verified(model: tuple[Any, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = run("prune", *model, "--rate", 0.5, "--recover", "solve", *LOOK, "--out", out)[0]
    assert " on 128 inputs; best result: " in text
    output = results(out)
    assert f"Accuracy on {output['test_images']} test images: original " in text
    assert 0 < output["test_images"] <= output["asked"]["test"] == 2000
    assert output["recovery"]["after"] < output["recovery"]["before"]
    assert [layer["layer"] for layer in output["recovery"]["layers"]] == ["0", "3", "8"]
    assert set(output["accuracy"]) == {"original", "compact", "recovered"}
    assert "Verified" in run("verify", out, "--model", model[0])[0]


def test_a_changed_file_is_not_the_recovered_one(model: tuple[Any, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("prune", *model, "--rate", 0.5, "--recover", "norms", *LOOK, "--out", out)
    file = out / "small.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as held:
        metadata = held.metadata()
    tensors["0.weight"] += 1
    metadata[DIGEST] = content_sha256(tensors, metadata)
    save_file(tensors, file, metadata)
    message = refused("verify", out, "--model", model[0], code=1)
    assert "is not the model that was written" in message


def test_without_data(model: tuple[Any, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("prune", *model, "--rate", 0.5, "--recover", "weights", "--out", out)
    assert results(out)["recovery"]["method"] == "weights"
    assert "accuracy" not in results(out)


def test_sensitivity_and_rates_from_it(model: tuple[Any, ...], tmp_path: Path) -> None:
    file, out = tmp_path / "sensitivity.json", tmp_path / "out"
    text = run("sensitivity", *model, *LOOK, "--out", file)[0]
    assert "| group | units |" in text
    assert [line.split("|")[1].strip() for line in text.splitlines()[-4:-2]] == ["0", "3"]
    assert "Accuracy on the same inputs" in text
    output = json.loads(run("sensitivity", *model, *LOOK, "--out", file, "--json")[0])
    assert [group["name"] for group in output["groups"]] == ["0", "3"]
    assert all(0 <= fraction <= 1 for g in output["groups"] for fraction in g["accuracy"].values())
    assert list(output["groups"][0]["accuracy"]) == ["0.2", "0.4", "0.6", "0.8"]
    quick = run("sensitivity", *model, *LOOK, "--no-accuracy")[0]
    assert "Accuracy" not in quick
    run("prune", *model, "--macs", 0.4, "--align", 1, "--allocate", file, "--out", out)
    assert json.loads((out / "plan.json").read_text())["asked"]["allocate"] == "sensitivity"
    assert results(out)["achieved"]["macs_removed"] >= 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recover", "solve"), "--recover solve needs images: pass --data."),
        (("--recover", "x"), "--recover is 'x': give one of solve, norms, weights."),
        (("--allocate", "sensitivity"), "--allocate sensitivity needs images: pass --data."),
        (("--distil", 5), "--distil starts from a recovered model: add --recover solve."),
        (("--recover", "solve", *LOOK, "--mean", "a", "--std", "1"), "--mean is 'a': write"),
        (("--distil", "nan", "--recover", "solve", *LOOK), "--distil is nan: give a number"),
        (("--distil", -5, "--recover", "solve", *LOOK), "--distil is -5.0: give a number"),
        (
            ("--recover", "solve", *LOOK, "--images", 0),
            "--images is 0: give an integer of at least 1",
        ),
        (("--recover", "solve", *LOOK, "--mean", "1"), "--mean and --std go together"),
        (("--allocate", "no.json"), "no.json cannot be read"),
        (
            ("--recover", "solve", "--data", "digits"),
            "--data digits gives images of 1x8x8, which",
        ),
    ],
)
def test_refusals(
    model: tuple[Any, ...], tmp_path: Path, options: tuple[Any, ...], message: str
) -> None:
    out = tmp_path / "out"
    assert message in refused("prune", *model, "--rate", 0.5, *options, "--out", out)
    assert not out.exists()


def test_sensitivity_needs_data(model: tuple[Any, ...]) -> None:
    assert "pass --data" in refused("sensitivity", *model)


def test_a_recovered_model_is_trained_on_with_labels(tmp_path: Path) -> None:
    """What `fpgm prune --recover` wrote is where the shipped recipe starts."""
    shipped = ("resnet20", "--weights", "shipped", "--data", "cifar10-sample")
    out, trained = tmp_path / "small", tmp_path / "trained"
    run("prune", *shipped, "--rate", 0.5, "--recover", "solve", "--images", 64, "--out", out)
    outcome = results(out)
    compact = f"model.compact={out / 'small.safetensors'}"
    run("train", "cifar10-sample-finetune", "--set", compact, "--set", "train.epochs=1",
        "--set", "data.limit=1000", "--out", trained)  # fmt: skip
    assert results(trained)["accuracy"] > outcome["accuracy"]["recovered"]
    kept = [load_file(folder / "small.safetensors") for folder in (out, trained)]
    assert {k: v.shape for k, v in kept[0].items()} == {k: v.shape for k, v in kept[1].items()}


def test_text_says_if_no_candidate_was_better() -> None:
    candidates = (Candidate(PRUNED, 0.1, 0.9), Candidate(DISTILLED, 0.2, 0.8))
    output = Recovery("solve", (), 0.1, 0.1, 32, 32, 0, 2.0, candidates=candidates)
    assert recovery_lines(output) == [
        "Recovery took 2 s on 32 inputs; best result: none, the weights were kept.",
        "The predicted class is the original's for 90.0% of inputs (90.0% before recovery).",
    ]
