"""Ways to train: each gives the network that was asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.runs import (
    BASE,
    logged,
    recipe,
    same,
    weights,
    write_net,
)

from fpgm.data.base import ProcessShare
from fpgm.errors import RequestError
from fpgm.training import train
from fpgm.training.recipe import make_recipe
from fpgm.training.trainer import _open_data


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


def test_compiled(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that needs no compiler: what matters is what the wrapping does to a run."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain = train(recipe(tiny), tmp_path / "plain").model
    compiled = train(recipe(tiny, run={"compile": True}), tmp_path / "compiled").model
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_last_pruning_does_not_throw_the_average_away(tiny: str, tmp_path: Path) -> None:
    """In the only epoch every unit that goes changes sides; what is kept is still an average."""
    options = {"epochs": 1, "lr": 0.5}
    kept = train(recipe(tiny, train={**options, "ema": 0.999}), tmp_path / "average").model
    last = train(recipe(tiny, train=options), tmp_path / "plain").model
    for a, b in zip(kept.parameters(), last.parameters(), strict=True):
        assert a.shape == b.shape
    assert not torch.allclose(kept[-1].weight, last[-1].weight, rtol=1e-2)


def test_a_batch_in_parts_is_the_batch(tmp_path: Path) -> None:
    """Without batch norm, which sees its part only, accumulated gradients are the whole's."""
    net = write_net(tmp_path, "", 0.0)
    complete = train(recipe(net), tmp_path / "whole").model
    parts = train(recipe(net, run={"accumulate": 3}), tmp_path / "parts").model
    for a, b in zip(complete.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_batch_that_cannot_be_shared_is_refused(tiny: str) -> None:
    with pytest.raises(
        RequestError, match=r"^data\.batch is 32: it must be divisible by the 3 processes\.$"
    ):
        _open_data(recipe(tiny), ProcessShare(0, 3), torch.device("cpu"))
