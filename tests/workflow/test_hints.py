"""Frequent mistakes are answered with the corrected call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.shell import refused, run
from torch import Tensor, nn

import fpgm
from fpgm.models import digits
from fpgm.models.checkpoint import load_weights


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


X = torch.randn(1, 3, 8, 8)
PLAN = fpgm.plan(net(), X, rate=0.5, align=1)

SWAPPED: list[tuple[Callable[..., Any], str]] = [
    (lambda: fpgm.prune(X, net(), rate=0.5), "Tensor|fpgm.plan(model, example_inputs)"),  # type: ignore[arg-type]
    (lambda: fpgm.plan(X, net(), rate=0.5), "Tensor|fpgm.plan(model, example_inputs)"),  # type: ignore[arg-type]
    (lambda: fpgm.analyze(X, net()), "Tensor|fpgm.plan(model, example_inputs)"),  # type: ignore[arg-type]
    (lambda: fpgm.SoftPruner(X, net(), rate=0.5), "Tensor|fpgm.plan(model, example_inputs)"),  # type: ignore[arg-type]
    (lambda: fpgm.compact(PLAN, net()), "Plan|fpgm.compact(model, plan)"),  # type: ignore[arg-type]
    (lambda: fpgm.mask_(PLAN, net()), "Plan|fpgm.compact(model, plan)"),  # type: ignore[arg-type]
    (lambda: fpgm.verify(PLAN, net(), X), "Plan|fpgm.compact(model, plan)"),  # type: ignore[arg-type]
    (lambda: fpgm.recover(PLAN, net(), [X]), "Plan|fpgm.compact(model, plan)"),  # type: ignore[arg-type]
    (lambda: fpgm.save("x.safetensors", net()), "str|fpgm.save(model, path)"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "words"), SWAPPED)
def test_swapped_arguments(call: Callable[..., Any], words: str) -> None:
    kind, right = words.split("|")
    with pytest.raises(fpgm.RequestError) as caught:
        call()
    expected = f"model is a {kind}: give the torch.nn.Module first, as in {right}."
    assert str(caught.value) == expected


class Model(nn.Module):
    """Stands in for the base of Ultralytics' YOLO, RTDETR and SAM."""

    def __init__(self) -> None:
        super().__init__()
        self.model = net()


Model.__module__ = "ultralytics.engine.model"


class YOLO(Model):
    pass


def test_what_ultralytics_wraps_is_named() -> None:
    with pytest.raises(fpgm.RequestError, match=r"Ultralytics' YOLO, .*: give yolo\.model\."):
        fpgm.prune(YOLO(), X, rate=0.5)
    fpgm.prune(YOLO().model, X, rate=0.5, align=1)


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> None:
        self.net(x)


def test_a_model_that_returns_nothing() -> None:
    with pytest.raises(fpgm.ModelError, match="forward returns None: let it return its outputs"):
        fpgm.prune(Forgetful(), X, rate=0.5)


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_a_suffix_that_torch_load_is_tried_on(suffix: str, tmp_path: Path) -> None:
    small, file = fpgm.prune(net(), X, rate=0.5, align=1), tmp_path / f"x{suffix}"
    with pytest.warns(UserWarning, match=r"torch\.load cannot read: name it x\.safetensors"):
        fpgm.save(small, file)
    assert torch.equal(fpgm.load(file, net)[0].weight, small[0].weight)  # type: ignore[index]


def test_a_pruned_model_given_as_weights(tmp_path: Path) -> None:
    run("prune", "digits", "--rate", 0.4, "--out", tmp_path / "a")
    file = tmp_path / "a" / "small.safetensors"
    message = refused("prune", "digits", "--weights", file, "--rate", 0.4, "--out", tmp_path / "b")
    assert message == (
        f"{file} is a pruned model: read it with fpgm.load(file, factory), or give the commands "
        "its folder."
    )
    whole = tmp_path / "whole.safetensors"
    fpgm.save(digits(), whole)
    load_weights(digits(), whole)  # nothing was pruned: these are ordinary weights
    with pytest.raises(fpgm.FileError, match="does not fit Sequential"):
        load_weights(net(), whole)
